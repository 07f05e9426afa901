"""`topg doctor`: the machine, and the kernels of a model."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.checkpoints import llama_config, write_huggingface
from topg import _native
from topg.backends.native.machine import Machine
from topg.cli.main import main


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = llama_config(num_hidden_layers=4, head_dim=32)
    return write_huggingface(tmp_path_factory.mktemp("doctor") / "tiny", config=config)


def examined(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    capsys.readouterr()
    status = main(["doctor", *arguments])
    said = capsys.readouterr()
    return status, said.out, said.err


def test_the_machine_is_shown_with_reasons(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TOPG_ISA", raising=False)
    status, out, _ = examined(capsys)
    rows = {line.split("  ")[0]: line for line in out.splitlines()}
    assert status == 0
    assert f"{_native.usable_isas()[-1]}: the best this processor can run" in rows["instructions"]
    assert f"{Machine.detect().default_threads}: " in rows["threads"]
    assert "GB/s" in rows["memory read"] and "operations/s" in rows["int8"] and "us" in rows["barrier"]


def test_a_forced_instruction_set_is_named(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOPG_ISA", "scalar")
    assert "scalar: TOPG_ISA asks for it" in examined(capsys)[1]
    monkeypatch.setenv("TOPG_ISA", "abacus")
    status, out, said = examined(capsys)
    assert status == 2 and out == "" and "'abacus'; this processor can run scalar" in said


def test_the_kernels_of_a_model_with_what_was_fused(
    source: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOPG_ISA", "scalar")
    status, out, _ = examined(capsys, str(source), "--quant", "mixed")
    lines = [" ".join(line.split()) for line in out.splitlines()]
    int8 = _native.linear_kernel("scalar", "int8", "int8", "bfloat16", 64, False)[0]
    bfloat16 = _native.linear_kernel("scalar", "bfloat16", "bfloat16", "none", 0, False)[0]
    assert status == 0
    assert "layer 0:" in lines and "layers 1 to 3, each:" in lines
    assert f"linear {bfloat16} + heads attention.query + attention.key + attention.value" in lines
    assert f"linear {int8} + gate mlp.gate + mlp.up + mlp.gated" in lines
    assert f"logits {int8} logits" in lines


def test_a_model_that_is_not_there_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    status, _, said = examined(capsys, "./nowhere")
    assert status == 1 and "there is nothing at ./nowhere" in said
