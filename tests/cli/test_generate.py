"""`topg generate`: text and JSON, where the prompt comes from, and how it fails."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support.checkpoints import llama_config, llama_tensors, write_huggingface
from support.models import tiny_converted
from topg import LLM, SamplingParams
from topg.cli.main import main
from topg.converter.convert import ModelConverter

FIXED = ["--temperature", "0", "--max-tokens", "6", "--seed", "1", "--ignore-eos"]
PARAMS = SamplingParams(temperature=0, max_tokens=6, seed=1, ignore_eos=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_converted(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def expected(model: Path) -> str:
    with LLM(model, max_context=64) as llm:
        return llm.generate("The quick", PARAMS)[0].text


def run(model: Path, *arguments: str) -> int:
    return main(["generate", str(model), "--max-context", "64", *FIXED, *arguments])


def pipe_in(monkeypatch: pytest.MonkeyPatch, raw: bytes) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(raw)))


def test_text_is_the_answer_and_a_line_feed(model: Path, expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(model, "--prompt", "The quick") == 0
    assert capsys.readouterr().out == f"{expected}\n"


@pytest.mark.parametrize("raw", [b"The quick", b"The quick\n"])
def test_standard_input_is_the_prompt(
    raw: bytes, model: Path, expected: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pipe_in(monkeypatch, raw)
    assert run(model) == 0
    assert capsys.readouterr().out == f"{expected}\n"


def test_json_has_the_fields_of_the_result(model: Path, expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(model, "--prompt-ids", "5,6,7", "--json", "--logprobs", "2") == 0
    data: dict[str, Any] = json.loads(capsys.readouterr().out)
    with LLM(model, max_context=64) as llm:
        (result,) = llm.generate([[5, 6, 7]], PARAMS)
    assert data["text"] == result.text and data["token_ids"] == list(result.token_ids)
    assert data["prompt_token_ids"] == [5, 6, 7] and data["finish_reason"] == "length"
    assert data["usage"] == {"prompt_tokens": 3, "completion_tokens": 6, "total_tokens": 9}
    assert (data["seed"], data["error"]) == (1, None)
    assert len(data["logprobs"]) == 6 and len(data["logprobs"][0]["top"]) == 2
    raw = bytes(byte for position in data["logprobs"] for byte in position["chosen"]["bytes"])
    assert raw.decode(errors="replace") == result.text


def test_flags_reach_the_sampler(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(model, "--prompt", "a", "--json", "--logit-bias", "9=100", "--stop-token-id", "9") == 0
    data = json.loads(capsys.readouterr().out)
    assert data["token_ids"] == [9] and data["finish_reason"] == "stop"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--prompt", "a", "--top-p", "1.5"], "top_p is 1.5"),
        (["--prompt", "a", "--logprobs", "2"], "--json"),
        (["--prompt", ""], "no tokens"),
        (["--prompt-ids", ""], "no tokens"),
        (["--prompt-ids", "1,999"], "token id 999"),
        (["--prompt", "a", "--logit-bias", "999=1"], "logit_bias is 999"),
        (["--prompt", "a" * 100], "context of 64"),
    ],
)
def test_wrong_requests_say_what_is_wrong(
    arguments: list[str], message: str, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(model, *arguments) == 2
    captured = capsys.readouterr()
    assert message in captured.err and captured.out == ""


@pytest.mark.parametrize(
    "arguments",
    [["--prompt", "a", "--prompt-ids", "1"], ["--prompt-ids", "a"], ["--logit-bias", "5"], ["--top-k", "x"]],
)
def test_wrong_usage_has_its_own_status(arguments: list[str], model: Path) -> None:
    with pytest.raises(SystemExit) as caught:
        run(model, *arguments)
    assert caught.value.code == 2


def test_standard_input_that_is_no_text_is_refused(
    model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pipe_in(monkeypatch, b"a\xff")
    assert run(model) == 2
    assert "byte 1 is 0xff" in capsys.readouterr().err


def test_settings_are_checked_before_the_model_is_loaded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", str(tmp_path / "nothing"), "--prompt", "a", "--min-p", "2"]) == 2
    assert "min_p is 2" in capsys.readouterr().err


@pytest.mark.parametrize("place", ["flag", "variable", "file"])
def test_a_context_beyond_the_model_is_refused_wherever_it_was_set(
    place: str, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ["generate", str(model), "--prompt", "a", *FIXED]
    file = tmp_path / "topg.yaml"
    file.write_text("execution:\n  max_context: 513\n")
    if place == "variable":
        monkeypatch.setenv("TOPG_EXECUTION_MAX_CONTEXT", "513")
    given = {"flag": ["--max-context", "513"], "variable": [], "file": ["--config", str(file)]}[place]
    assert main([*command, *given]) == 2
    assert "takes at most 512" in capsys.readouterr().err


def test_a_file_that_is_named_beats_the_one_of_the_environment(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOPG_CONFIG", str(tmp_path / "missing.yaml"))
    good = tmp_path / "good.yaml"
    good.write_text("execution:\n  max_context: 64\n")
    assert main(["generate", str(model), "--prompt", "The quick", "--config", str(good), *FIXED]) == 0
    assert "missing" not in capsys.readouterr().err


def test_a_failed_generation_has_status_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tensors = llama_tensors(llama_config())
    # The product of such values with the head is not finite.
    tensors["model.norm.weight"] = np.full_like(tensors["model.norm.weight"], 3e38)
    source = write_huggingface(tmp_path / "broken", tensors=tensors)
    broken = ModelConverter(source, tmp_path / "out", "float32").convert()
    capsys.readouterr()
    assert run(broken, "--prompt", "a") == 1
    assert "topg: error" in capsys.readouterr().err
    assert run(broken, "--prompt", "a", "--json") == 1
    assert json.loads(capsys.readouterr().out)["finish_reason"] == "error"


def test_impossible_constraints_are_refused(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(model, "--prompt", "a", "--logit-bias", "9=100", "--stop-token-id", "9", "--min-tokens", "1") == 2
    assert "min_tokens" in capsys.readouterr().err


def test_text_that_was_cut_off_says_so(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(model, "--prompt", "The quick") == 0
    assert "cut off at max_tokens" in capsys.readouterr().err
    assert run(model, "--prompt", "The quick", "--logit-bias", "2=100", "--stop-token-id", "2") == 0
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("as_json", [False, True])
def test_output_that_cannot_be_encoded_is_escaped(as_json: bool, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    raw = io.BytesIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(raw, encoding="ascii"))
    sharp = LLM(model, max_context=64).tokenizer.encode("ß", add_bos=False)
    assert run(model, "--prompt", "a", "--logit-bias", f"{sharp[0]}=100", *(["--json"] if as_json else [])) == 0
    sys.stdout.flush()
    assert ("\\ufffd" if len(sharp) > 1 else "\\xdf") in raw.getvalue().decode("ascii")
    if as_json:
        assert set(json.loads(raw.getvalue())["text"]) <= {"\ufffd", "ß"}


@pytest.mark.slow
def test_a_reader_that_goes_away_causes_no_noise(model: Path) -> None:
    command = [sys.executable, "-m", "topg", "generate", str(model), "--prompt", "The", "--max-context", "500"]
    command += ["--max-tokens", "400", "--ignore-eos"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.read(1)
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 1
