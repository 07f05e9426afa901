"""The native back end against the oracle: every stored format, every KV type, every instruction set."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest

from support.memory_model import Dimensions, MemoryModel, kept_model, random_model
from support.stepping import FloatArray, run_chunks
from topg import _native
from topg.backends.native import NativeBackend
from topg.kv.pages import KVType
from topg.precision.recipes import RECIPES

pytest.importorskip("torch")

from topg.backends.torch import TorchBackend  # after the check for torch

KEPT_TYPES = ("Q8_0", "Q4_0", "Q4_1", "Q4_K", "Q6_K")
KV_TYPES: tuple[KVType, ...] = ("float32", "bfloat16", "int8")
TOKENS = [int(token) for token in np.random.default_rng(1).integers(0, 99, 75)]
PAGES = [3, 1, 2]

# Sums in another order move a value by parts in a million, which now and then rounds an activation to the next code
# (or bfloat16): then single logits, of a spread of about 1, differ by some hundredths.  A 16- or 8-bit cache rounds
# queries and the softmax's weights too, where the oracle does not, so that most rows move a little.
BOUNDS: dict[KVType, tuple[float, float]] = {"float32": (5e-3, 0.1), "bfloat16": (0.03, 0.25), "int8": (0.04, 0.25)}
EXACT = 1e-4  # float32 throughout


@cache
def model(stored: str, head_dim: int) -> MemoryModel:
    """Heads of 32 values are finished by the linear that computes them, those of 16 by a step of their own."""
    size = Dimensions(head_dim=head_dim, hidden=128)
    return kept_model(stored) if stored in KEPT_TYPES else random_model(stored, size)


@cache
def expected(stored: str, head_dim: int, kv_dtype: KVType) -> FloatArray:
    backend = TorchBackend(model(stored, head_dim), page_count=4, tokens_per_page=32, kv_dtype=kv_dtype)
    return run_chunks(backend, TOKENS, PAGES, len(TOKENS))


def native_logits(stored: str, head_dim: int, kv_dtype: KVType, isa: str) -> FloatArray:
    backend = NativeBackend(model(stored, head_dim), page_count=4, tokens_per_page=32, kv_dtype=kv_dtype, isa=isa)
    return run_chunks(backend, TOKENS, PAGES, len(TOKENS))


@pytest.mark.parametrize("isa", _native.usable_isas())
@pytest.mark.parametrize("kv_dtype", KV_TYPES)
@pytest.mark.parametrize("stored", [*RECIPES, *KEPT_TYPES])
def test_logits_are_those_of_the_oracle(stored: str, kv_dtype: KVType, isa: str) -> None:
    error = np.abs(native_logits(stored, 32, kv_dtype, isa) - expected(stored, 32, kv_dtype))
    median, largest = BOUNDS[kv_dtype]
    assert np.median(error) < median and error.max() < largest


@pytest.mark.parametrize("isa", _native.usable_isas())
@pytest.mark.parametrize("head_dim", [12, 16, 32, 48, 64])
def test_float32_throughout_agrees_closely(head_dim: int, isa: str) -> None:
    error = np.abs(native_logits("float32", head_dim, "float32", isa) - expected("float32", head_dim, "float32"))
    assert error.max() < EXACT


def test_the_bounds_would_notice_a_lost_layer() -> None:
    """Logits of another model of the same kind are far beyond them."""
    other = TorchBackend(
        random_model("int8", Dimensions(head_dim=32, hidden=128, layers=1)), page_count=4, tokens_per_page=32
    )
    error = np.abs(run_chunks(other, TOKENS, PAGES, len(TOKENS)) - expected("int8", 32, "bfloat16"))
    assert np.median(error) > 3 * max(median for median, _ in BOUNDS.values())
