"""`topg convert`: what it prints, and its exit status."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.checkpoints import llama_config, llama_tensors, write_huggingface
from topg.cli.main import main
from topg.converter.format import ConvertedModel


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a head that the config denies, for a warning."""
    tensors = llama_tensors(llama_config())
    folder = tmp_path_factory.mktemp("cli") / "tiny"
    return write_huggingface(folder, config=llama_config(tie_word_embeddings=True), tensors=tensors)


def test_it_converts_and_sums_up(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "model"
    assert main(["convert", str(source), str(output), "--quant", "int4"]) == 0
    assert ConvertedModel.open(output).manifest.recipe == "int4"
    printed = capsys.readouterr()
    assert printed.out.startswith(f"{output}: int4, ")
    assert " kB -> " in printed.out and printed.out.count("\n") == 1
    assert printed.err.startswith("warning: the config ties the head to the embedding")


def test_the_default_recipe_is_int8(source: Path, tmp_path: Path) -> None:
    assert main(["convert", str(source), str(tmp_path / "model")]) == 0
    assert ConvertedModel.open(tmp_path / "model").manifest.recipe == "int8"


def test_an_output_that_exists_needs_the_flag(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:  # fmt: skip
    command = ["convert", str(source), str(tmp_path / "model"), "--quant"]
    assert main([*command, "int8"]) == 0
    assert main([*command, "int4"]) == 2
    assert "exists already" in capsys.readouterr().err
    assert main([*command, "int4", "--overwrite"]) == 0
    assert ConvertedModel.open(tmp_path / "model").manifest.recipe == "int4"


def test_an_unknown_recipe_is_wrong_usage(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["convert", str(source), str(tmp_path / "model"), "--quant", "int3"])
    assert caught.value.code == 2
    assert "int8_weight_only" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
