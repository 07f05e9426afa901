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
from topg.errors import BackendError, CheckpointError, RequestError
from topg.kv.pages import KVGeometry, PageAccountingError
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


def test_geometry_and_plan(backend: TorchBackend, model: MemoryModel) -> None:
    assert backend.kv == KVGeometry(layers=2, kv_heads=2, head_dim=16, dtype="float32", tokens_per_page=32)
    assert backend.plan is model.plan


def test_rows_come_back_in_the_order_of_slices_and_tokens(backend: TorchBackend) -> None:
    first, second, third = [1, 2, 3], [4, 5], [6, 7, 8, 9]
    everything = [run_chunks(backend, tokens, [0], len(tokens)) for tokens in (first, second, third)]
    wanted = (SequenceSlice(first, 0, [3]), SequenceSlice(second, 0, [1], "none"), SequenceSlice(third, 0, [2], "all"))
    step = Step(wanted)
    expected = np.concatenate((everything[0][-1:], everything[2]))
    np.testing.assert_array_equal(backend.run(step), expected)


def test_a_step_may_want_no_logits(backend: TorchBackend) -> None:
    assert backend.run(Step((SequenceSlice([1, 2], 0, [0], "none"),))).shape == (0, 99)


def test_the_result_stays_valid(backend: TorchBackend) -> None:
    step = Step((SequenceSlice([1, 2], 0, [0]),))
    logits = backend.run(step)
    kept = logits.copy()
    backend.run(Step((SequenceSlice([50, 51], 0, [0]),)))
    np.testing.assert_array_equal(logits, kept)
    assert logits.dtype == np.float32


def test_a_copied_page_holds_the_same_tokens(backend: TorchBackend) -> None:
    tokens = list(range(40))
    expected = run_chunks(backend, tokens, [0, 1], 40)[-1:]
    backend.copy_page(1, 5)
    run_chunks(backend, [9] * 32, [1], 32)
    np.testing.assert_array_equal(backend.run(Step((SequenceSlice([39], 39, [0, 5]),))), expected)
    with pytest.raises(PageAccountingError, match="page 8 cannot be copied; the pool has 8 pages"):
        backend.copy_page(1, 8)


@pytest.mark.parametrize(
    ("slices", "message"),
    [
        ([], "no slices"),
        ([SequenceSlice([], 0, [0])], "0 tokens from position 0"),
        ([SequenceSlice([1], -1, [0])], "1 tokens from position -1"),
        ([SequenceSlice([1, 99], 0, [0])], "token id 99 does not exist; the model has ids 0 to 98"),
        ([SequenceSlice([-1], 0, [0])], "token id -1 does not exist"),
        ([SequenceSlice([1], 0, [0], "first")], "'first'; allowed: none, last, all"),  # type: ignore[arg-type]
    ],
)
def test_bad_tokens_are_refused(backend: TorchBackend, slices: list[SequenceSlice], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        backend.run(Step(tuple(slices)))


@pytest.mark.parametrize(
    ("slices", "message"),
    [
        ([SequenceSlice([1, 2], 31, [0])], "1 pages has room for 32 of 33 tokens"),
        ([SequenceSlice([1], 0, [8])], "page 8; the pool has pages 0 to 7"),
        ([SequenceSlice([1], 0, [-1])], "page -1"),
        ([SequenceSlice([1], 0, [3]), SequenceSlice([1], 0, [3])], "page 3 is written"),
        ([SequenceSlice([1], 40, [2, 3]), SequenceSlice([1], 64, [2, 3, 4])], "page 3 is written"),
        ([SequenceSlice([1] * 40, 0, [6, 6])], "page 6 is written"),
    ],
)
def test_bad_page_tables_are_refused(backend: TorchBackend, slices: list[SequenceSlice], message: str) -> None:
    with pytest.raises(PageAccountingError, match=message):
        backend.run(Step(tuple(slices)))


def test_sequences_may_read_a_shared_page(backend: TorchBackend) -> None:
    tokens = list(range(33))
    expected = run_chunks(backend, tokens, [0, 1], 33)[-1]
    logits = backend.run(Step((SequenceSlice([32], 32, [0, 1]), SequenceSlice([32], 32, [0, 2]))))
    np.testing.assert_array_equal(logits, np.stack((expected, expected)))


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
    with pytest.raises(BackendError, match="'int8'; allowed: float32, bfloat16"):
        TorchBackend(model, page_count=1, tokens_per_page=32, kv_dtype="int8")  # type: ignore[arg-type]


def test_load_backend_loads_the_torch_back_end(model: MemoryModel) -> None:
    assert isinstance(load_backend(model, page_count=1, tokens_per_page=32), TorchBackend)


def test_without_torch_the_message_says_what_to_install(model: MemoryModel, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("topg.backends.torch")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(BackendError, match=r"pip install 'topg\[torch\]'"):
        load_backend(model, page_count=1, tokens_per_page=32)


def test_importing_backends_loads_no_torch() -> None:
    script = "import sys, topg.backends; sys.exit('torch' in sys.modules)"
    source = str(Path(topg.backends.__file__).parents[2])
    subprocess.run([sys.executable, "-c", script], check=True, env={"PYTHONPATH": source})
