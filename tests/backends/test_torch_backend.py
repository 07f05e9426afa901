"""Loading a model and running steps: what is refused, and which rows come back."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest

import topg.backends
from support.memory_model import Dimensions, MemoryModel, decoder_plan, random_model
from support.stepping import run_chunks
from topg.backends import SequenceSlice, Step, load_backend
from topg.errors import BackendError, CheckpointError
from topg.ops import Op
from topg.plan import Plan

torch = pytest.importorskip("torch")

from topg.backends.torch import KERNELS, TorchBackend  # noqa: E402  # after the check for torch


@pytest.fixture(scope="module")
def model() -> MemoryModel:
    return random_model("float32")


@pytest.fixture(scope="module")
def backend(model: MemoryModel) -> TorchBackend:
    return TorchBackend(model, page_count=8, tokens_per_page=32, kv_dtype="float32")


@dataclass(frozen=True)
class Negate(Op):
    """A custom op, not registered: output = -input."""

    kind: ClassVar[str] = "negate"
    buffer_fields: ClassVar[tuple[str, ...]] = ("input",)

    input: str


def _with_custom_op(model: MemoryModel) -> MemoryModel:
    plan = model.plan
    changed = MemoryModel.__new__(MemoryModel)
    changed.__dict__ = dict(model.__dict__)
    negate = Negate("negate", "x", "x")
    changed.plan = Plan((*plan.ops[:1], negate, *plan.ops[1:]), plan.buffers)
    return changed


def test_an_op_without_a_kernel_is_refused_by_name(model: MemoryModel) -> None:
    with pytest.raises(BackendError, match=r"no kernel for op 'negate' \('negate'\); it has: activation, add"):
        TorchBackend(_with_custom_op(model), page_count=1, tokens_per_page=32)


def test_a_kernel_may_be_added(model: MemoryModel) -> None:
    kernels = {**KERNELS, "negate": lambda op, context: -context.buffers[op.input]}
    changed = TorchBackend(_with_custom_op(model), page_count=1, tokens_per_page=32, kernels=kernels)
    plain = TorchBackend(model, page_count=1, tokens_per_page=32)
    step = Step((SequenceSlice([1, 2], 0, [0]),))
    assert not np.allclose(changed.run(step), plain.run(step))


def test_a_plan_must_select_rows(model: MemoryModel) -> None:
    changed = MemoryModel.__new__(MemoryModel)
    changed.__dict__ = dict(model.__dict__)
    changed.plan = Plan(tuple(op for op in model.plan.ops if op.kind != "select_rows"), model.plan.buffers)
    with pytest.raises(BackendError, match="one select_rows op"):
        TorchBackend(changed, page_count=1, tokens_per_page=32)


def test_a_tensor_of_the_wrong_shape_is_refused_by_name() -> None:
    plan = decoder_plan(Dimensions(vocab=99))
    model = random_model("float32", Dimensions(vocab=98))
    model.plan = plan
    with pytest.raises(CheckpointError, match=r"'embed_tokens.weight' of shape \(99, 64\); it has \(98, 64\)"):
        TorchBackend(model, page_count=1, tokens_per_page=32)


@pytest.mark.parametrize("device", ["nonsense", "cuda:99"])
def test_a_device_that_does_not_exist_is_refused(model: MemoryModel, device: str) -> None:
    with pytest.raises(BackendError, match=f"no usable device '{device}'"):
        TorchBackend(model, page_count=1, tokens_per_page=32, device=device)


def test_an_unknown_kv_type_is_refused(model: MemoryModel) -> None:
    with pytest.raises(BackendError, match="'int4'; allowed: float32, bfloat16, int8"):
        TorchBackend(model, page_count=1, tokens_per_page=32, kv_dtype="int4")  # type: ignore[arg-type]


def test_int8_keys_and_values_cost_little(backend: TorchBackend, model: MemoryModel) -> None:
    tokens = list(range(40))
    rounded = TorchBackend(model, page_count=8, tokens_per_page=32, kv_dtype="int8")
    exact, near = run_chunks(backend, tokens, [0, 1], 40), run_chunks(rounded, tokens, [0, 1], 40)
    assert 0 < np.abs(near - exact).max() < 0.1
    assert rounded.page_bytes(rounded.kv) == 2 * 2 * 2 * (16 + 4) * 32


def test_without_torch_the_message_says_what_to_install(model: MemoryModel, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("topg.backends.torch")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(BackendError, match=r"pip install 'topg\[torch\]'"):
        load_backend(model, "torch", page_count=1, tokens_per_page=32)


def test_importing_backends_loads_no_torch() -> None:
    script = "import sys, topg.backends; sys.exit('torch' in sys.modules)"
    source = str(Path(topg.backends.__file__).parents[2])
    subprocess.run([sys.executable, "-c", script], check=True, env={"PYTHONPATH": source})
