"""`topg plan`: its table, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from support.checkpoints import llama_config, write_huggingface
from topg.cli.main import main
from topg.converter import ModelConverter


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tied model with a context of 512 tokens."""
    return write_huggingface(tmp_path_factory.mktemp("plan") / "tiny", config=llama_config(tie_word_embeddings=True))


def planned(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    capsys.readouterr()
    status = main(["plan", *arguments])
    said = capsys.readouterr()
    return status, said.out, said.err


def test_a_tied_head_shares_its_weights(source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, table, _ = planned(capsys, str(source))
    logits = next(line.split() for line in table.splitlines() if line.startswith("logits"))
    assert status == 0 and "shared" in logits
    assert "step of 1 token after 0 cached" in table
    assert "step of 2 tokens after 0 cached" in planned(capsys, str(source), "--tokens", "2")[1]


@pytest.mark.parametrize(
    "arguments", [("--tokens", "513"), ("--context", "512"), ("--tokens", "13", "--context", "500")]
)
def test_a_step_beyond_the_context_is_refused(
    source: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...]
) -> None:
    status, out, said = planned(capsys, str(source), *arguments)
    assert status != 0 and out == "" and "513 tokens together; the model's context has 512" in said
    assert planned(capsys, str(source), "--context", "511")[0] == 0


@pytest.mark.parametrize("number", ["0", "-1", "1_0", "9" * 5000])
def test_a_step_has_a_token_or_more(source: Path, capsys: pytest.CaptureFixture[str], number: str) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["plan", str(source), "--tokens", number])
    assert caught.value.code == 2 and len(capsys.readouterr().err) < 3000


def test_a_damaged_model_is_refused_in_words(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:  # fmt: skip
    folder = ModelConverter(source, tmp_path / "model").convert()
    assert planned(capsys, str(folder))[0] == 0
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["tensors"]["norm.twist"] = manifest["tensors"].pop("norm.weight")
    (folder / "manifest.json").write_text(json.dumps(manifest))
    status, out, said = planned(capsys, str(folder))
    assert status == 1 and out == "" and "tensors that do not exist: 'norm.weight'" in said


def test_the_columns_are_explained(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["plan", "--help"])
    said = " ".join(capsys.readouterr().out.split())
    assert "precision is how its weights are stored / what its inputs are rounded to" in said
