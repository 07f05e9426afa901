"""Numbers that are not usable, and models that do not load: each is told, and hurts nobody else."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pytest

from support.memory_model import Dimensions, MemoryModel, decoder_plan, random_model
from support.stepping import run_chunks
from topg import _native
from topg.backends import SequenceSlice, Step
from topg.backends.native import NativeBackend
from topg.errors import BackendError, CheckpointError, ComputeError
from topg.kv.pages import KVType
from topg.ops import Op
from topg.plan import Plan
from topg.precision.formats import FLOAT32, INT8_ROTATED, Precision
from topg.sampling import SamplerState
from topg.sampling_params import SamplingParams

BAD_TOKEN = 7
GOOD = list(range(20, 60))


def poisoned(value: float) -> MemoryModel:
    """An int8 model whose float32 embedding of one token holds a number that is not finite."""
    plan = decoder_plan(Dimensions(head_dim=32))
    rng = np.random.default_rng(0)
    shapes = {name: shape for op in plan.ops for name, shape in op.tensor_shapes().items()}
    tensors = {
        name: (rng.standard_normal(shape) * shape[-1] ** -0.5).astype(np.float32) for name, shape in shapes.items()
    }
    plain = {name for name, shape in shapes.items() if len(shape) == 1} | {"embed_tokens.weight"}
    model = MemoryModel(plan, tensors, {name: FLOAT32 if name in plain else INT8_ROTATED for name in tensors})
    model.part("embed_tokens.weight", "values")[BAD_TOKEN, 5] = value
    return model


@pytest.fixture(scope="module", params=[np.nan, np.inf], ids=["nan", "inf"])
def model(request: pytest.FixtureRequest) -> MemoryModel:
    return poisoned(request.param)


def load(model: MemoryModel, isa: str, kv_dtype: KVType = "bfloat16") -> NativeBackend:
    return NativeBackend(model, page_count=12, tokens_per_page=32, kv_dtype=kv_dtype, isa=isa, threads=2)


@pytest.mark.parametrize("isa", _native.usable_isas())
@pytest.mark.parametrize("kv_dtype", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("good", [GOOD[:1], GOOD], ids=["few rows", "many rows"])
def test_what_is_not_finite_stays_in_its_sequence(
    model: MemoryModel, isa: str, kv_dtype: KVType, good: list[int]
) -> None:
    backend = load(model, isa, kv_dtype)
    alone = run_chunks(backend, good, [4, 5], len(good))
    bad = [3, BAD_TOKEN, *good]
    logits = backend.run(Step((SequenceSlice(good, 0, [0, 1], "all"), SequenceSlice(bad, 0, [2, 3], "all"))))
    np.testing.assert_array_equal(logits[: len(good)].view(np.uint32), alone.view(np.uint32))
    assert np.isnan(logits[len(good) + 1 :]).any(axis=1).all(), "and every token after it is told"


@pytest.mark.parametrize("isa", _native.usable_isas())
@pytest.mark.parametrize("kv_dtype", ["float32", "bfloat16", "int8"])
def test_a_page_that_held_them_is_as_good_as_new(model: MemoryModel, isa: str, kv_dtype: KVType) -> None:
    backend = load(model, isa, kv_dtype)
    clean = run_chunks(backend, GOOD, [4, 5], 7)
    backend.run(Step((SequenceSlice([BAD_TOKEN] * 64, 0, [0, 1]),)))
    np.testing.assert_array_equal(run_chunks(backend, GOOD, [1, 0], 7).view(np.uint32), clean.view(np.uint32))


def test_a_row_without_usable_numbers_is_an_error_of_its_request(model: MemoryModel) -> None:
    backend = load(model, "")
    for params in (SamplingParams(temperature=0), SamplingParams(temperature=1.0), SamplingParams(logprobs=2)):
        states = [SamplerState(params, 0, prompt, [], 99) for prompt in (GOOD, [BAD_TOKEN], GOOD)]
        slices = (SequenceSlice(GOOD, 0, [0, 1]), SequenceSlice([BAD_TOKEN], 0, [2]), SequenceSlice(GOOD, 0, [3, 4]))
        first, second, third = backend.run_and_sample(Step(slices), states)
        assert isinstance(second, ComputeError) and "NaN" in str(second)
        assert first == third and not isinstance(first, ComputeError)


@dataclass(frozen=True)
class Negate(Op):
    kind: ClassVar[str] = "negate"
    buffer_fields: ClassVar[tuple[str, ...]] = ("input",)

    input: str


def changed(**attributes: object) -> MemoryModel:
    """A float32 model with some attributes replaced."""
    model = random_model("float32")
    model.__dict__.update(attributes)
    return model


def test_an_op_without_a_kernel_is_refused_by_name() -> None:
    plan = random_model("float32").plan
    ops = (*plan.ops[:1], Negate("turned", "x", "x"), *plan.ops[1:])
    with pytest.raises(BackendError, match=r"no kernel for op 'negate' \('turned'\)"):
        NativeBackend(changed(plan=Plan(ops, plan.buffers)), page_count=1, tokens_per_page=32)


@pytest.mark.parametrize("precision", [
    Precision("float16", "bfloat16"), Precision("int8", "float32", group_size=64, scale="bfloat16"),
    Precision("int4", "bfloat16", group_size=32, scale="float16"),
], ids=Precision.describe)  # fmt: skip
def test_a_precision_without_a_kernel_is_refused_by_name(precision: Precision) -> None:
    plan = decoder_plan(Dimensions())
    shapes = {name: shape for op in plan.ops for name, shape in op.tensor_shapes().items()}
    tensors = {name: np.ones(shape, np.float32) for name, shape in shapes.items()}
    model = MemoryModel(plan, tensors, {"layers.0.o_proj.weight": precision})
    with pytest.raises(BackendError, match=r"tensor 'layers.0.o_proj.weight': .* has no native kernel"):
        NativeBackend(model, page_count=1, tokens_per_page=32)


def test_a_tensor_of_the_wrong_shape_is_refused_by_name() -> None:
    model = random_model("float32", Dimensions(vocab=98))
    model.plan = decoder_plan(Dimensions(vocab=99))
    with pytest.raises(CheckpointError, match=r"'embed_tokens.weight' of shape \(99, 64\); it has \(98, 64\)"):
        NativeBackend(model, page_count=1, tokens_per_page=32)


def test_a_damaged_part_is_refused_by_name() -> None:
    model = random_model("int8")
    model.part("layers.0.q_proj.weight", "codes").resize((64, 32), refcheck=False)
    with pytest.raises(CheckpointError, match=r"'layers.0.q_proj.weight' of the converted model is damaged"):
        NativeBackend(model, page_count=1, tokens_per_page=32)
