"""`topg bench`: what it measures on a tiny model, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from support.checkpoints import write_huggingface
from topg.benchmark import Benchmark, Case, Spread, make_cases
from topg.cli.main import main
from topg.config import resolve
from topg.converter import ModelConverter
from topg.converter.format import ConvertedModel
from topg.ops import Workload

QUICK = ("--decode-steps", "3", "--repetitions", "2", "--threads", "1")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A converted model with a context of 512 tokens."""
    folder = tmp_path_factory.mktemp("bench")
    return ModelConverter(write_huggingface(folder / "tiny"), folder / "model").convert()


def benched(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    capsys.readouterr()
    status = main(["bench", *arguments])
    said = capsys.readouterr()
    return status, said.out, said.err


def test_the_table_has_a_line_for_every_case(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = benched(capsys, str(model), "--prompt-lengths", "5,40", "--batch", "1,3", *QUICK)
    machine, header, *lines, memory = out.splitlines()
    assert status == 0
    assert machine.startswith(f"{model.name} (int8, KV cache bfloat16) on ") and "1 threads" in machine
    assert header.split()[:2] == ["prompt", "batch"]
    assert [line.split()[:2] for line in lines] == [["5", "1"], ["5", "3"], ["40", "1"], ["40", "3"]]
    assert memory.startswith("peak memory ") and "loaded in" in memory


def test_json_holds_the_figures_and_no_table(
    model: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:  # fmt: skip
    arguments = (str(model), "--prompt-lengths", "20", "--batch", "2", *QUICK)
    status, out, _ = benched(capsys, *arguments, "--json", "-")
    data = json.loads(out)
    assert status == 0
    assert benched(capsys, *arguments, "--json", str(tmp_path / "figures.json"))[1].startswith(model.name)
    assert json.loads((tmp_path / "figures.json").read_text()).keys() == data.keys()
    (case,) = data["cases"]
    assert case["case"] | {"overlap": 0} == {"prompt_tokens": 20, "batch": 2, "decode_steps": 3, "overlap": 0}
    assert 0 <= case["outside_backend"] < case["outside_native"] < 1
    assert case["limits"]["read_bytes_per_second"] > 0 and data["peak_bytes"] > 10_000_000
    assert_consistent(case)


def assert_consistent(case: dict[str, Any]) -> None:
    step, prefill = case["step_seconds"], case["prefill_tokens_per_second"]
    assert step["low"] <= step["median"] <= step["high"]
    assert case["decode_tokens_per_second"] == pytest.approx(case["case"]["batch"] / step["median"])
    assert prefill["low"] <= prefill["median"] <= prefill["high"]
    assert 0 < case["read_share"] < 1 and 0 < case["peak_share"] < 1


def test_the_torch_back_end_is_measured_without_shares(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("torch")
    arguments = ("--prompt-lengths", "20", "--batch", "1", *QUICK, "--backend", "torch", "--json", "-")
    case = json.loads(benched(capsys, str(model), *arguments)[1])["cases"][0]
    assert case["read_share"] is case["peak_share"] is case["limits"] is case["outside_native"] is None
    assert case["decode_tokens_per_second"] > 0 and 0 <= case["outside_backend"] < 1


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--prompt-lengths", "510"), "need a context of 517; the model's has 512: lower --prompt-lengths"),
        (("--prompt-lengths", "50", "--max-context", "52"), "execution.max_context is 52 (--max-context)"),
        (("--prompt-lengths", "5", "--batch", "4", "--max-batch-size", "3"), "execution.max_batch_size is 3"),
        (("--prompt-lengths", "5", "--threads", "0"), "threads is 0; allowed"),
        (("--prompt-lengths", "5", "--batch", "20", "--prefill-chunk", "16"), "raise prefill_chunk to 20"),
    ],
)
def test_what_cannot_be_measured_is_refused(
    model: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], says: str
) -> None:
    given = (*arguments, "--batch", "1") if "--batch" not in arguments else arguments
    status, out, said = benched(capsys, str(model), "--decode-steps", "3", *given)
    assert (status, out) == (2, "") and says in said, said


@pytest.mark.parametrize("given", [("--batch", "0"), ("--batch", "1,"), ("--prompt-lengths", ""), ("--batch", "1.5"),
                                   ("--decode-steps", "-1"), ("--repetitions", "0"), ("--batch", "1," * 64 + "1"),
                                   ("--prompt-lengths", "9" * 5000), ("--json", "")])  # fmt: skip
def test_bad_numbers_are_refused(capsys: pytest.CaptureFixture[str], given: tuple[str, str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["bench", "nothing", *given])
    said = capsys.readouterr().err
    assert caught.value.code == 2 and f"argument {given[0]}: " in said and len(said) < 3000


def test_cases_that_do_not_fit_the_cache_are_left_out(
    model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Benchmark, "fits", lambda self, case: case.batch == 1)
    status, out, said = benched(capsys, str(model), "--prompt-lengths", "5", "--batch", "1,2", *QUICK)
    assert status == 0 and len(out.splitlines()) == 4 and "2 streams of 12 tokens need more KV cache" in said
    monkeypatch.setattr(Benchmark, "fits", lambda self, case: False)
    status, _, said = benched(capsys, str(model), "--prompt-lengths", "5", "--batch", "1", *QUICK)
    assert status == 1 and "no case fits the KV cache" in said


# ---- what is counted


def test_streams_that_answer_early_still_run_the_decode_steps_together(model: Path) -> None:
    """Prompts are read in so many chunks that the first streams answer long before the last is read."""
    (case,) = make_cases([30], [6], decode_steps=4, prefill_chunk=8)
    resolved = resolve({"execution.prefill_chunk": 8, "execution.max_batch_size": 6})
    bench = Benchmark(ConvertedModel.open(model), [case], resolved, "cpu", 1)
    result = bench.run(case, 1, lambda: None)
    steps = bench.backend.steps
    assert sum(step.is_decode(case) for step in steps) == 5
    assert sum(step.ends_prompt(30) for step in steps) == 6
    assert result.first_token_seconds.low < result.first_token_seconds.high
    assert result.limits is None and result.read_share is None
    assert bench.fits(case) and not bench.fits(Case(30, 600, 4, 1))
    bench.close()


def test_shares_are_of_the_bytes_and_operations_of_the_plan(model: Path) -> None:
    (case,) = make_cases([64], [1], decode_steps=3, prefill_chunk=512)
    bench = Benchmark(ConvertedModel.open(model), [case], resolve(), "cpu", 1)
    slow = dict.fromkeys(("read_bytes_per_second", "int8_ops_per_second", "bfloat16_ops_per_second",
                          "float32_ops_per_second"), 1.0)  # fmt: skip
    result = bench.run(case, 1, lambda: slow)
    bench.close()
    assert result.read_share is not None and result.peak_share is not None
    weights = sum(file.stat().st_size for file in model.glob("*.safetensors"))
    assert 0.5 * weights < result.read_share * result.step_seconds.median < 2 * weights
    operations = sum(op.flops(Workload(64, 0, 1)) for op in bench.model.plan.ops)
    assert result.peak_share / result.prefill_tokens_per_second.median * 64 == pytest.approx(operations, rel=0.3)


def test_a_spread_is_the_median_and_the_middle_four_fifths() -> None:
    assert Spread.of([3.0]) == Spread(3.0, 3.0, 3.0)
    spread = Spread.of([float(value) for value in range(11)])
    assert (spread.median, spread.low, spread.high) == (5.0, 1.0, 9.0) and spread.relative == pytest.approx(0.8)
