"""Linears whose weights are float32, float16 or bfloat16, on every instruction set of this machine."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from support.packed_weights import plain_weight
from topg import _native
from topg.precision.bfloat16 import from_bfloat16, to_bfloat16

FORMATS = ["float32", "float16", "bfloat16"]

pytestmark = [
    pytest.mark.parametrize("isa", _native.usable_isas()),
    pytest.mark.parametrize("code", FORMATS),
]


def _rounded(x: NDArray[np.float32], code: str) -> NDArray[np.float32]:
    """As the format multiplies activations."""
    return from_bfloat16(to_bfloat16(x)) if code == "bfloat16" else x


@pytest.mark.parametrize(("channels", "columns"), [(32, 64), (1, 1), (33, 7), (95, 31), (64, 576), (40, 515)])
def test_products_agree_with_float64(isa: str, code: str, channels: int, columns: int) -> None:
    rng = np.random.default_rng(channels * columns)
    weight = plain_weight(rng.normal(size=(channels, columns)).astype(np.float32), code)
    x = rng.normal(size=(5, columns)).astype(np.float32)
    out = _native.plain_linear(isa, weight.packed, x, min(5, _native.plain_tile_rows(isa, weight.packed)))
    exact = _rounded(x, code).astype(np.float64) @ weight.values.astype(np.float64).T
    terms = np.abs(_rounded(x, code)).astype(np.float64) @ np.abs(weight.values).astype(np.float64).T
    assert (np.abs(out - exact) <= columns * 2.0**-24 * terms + 1e-30).all()


@pytest.mark.parametrize("columns", [2, 63, 100, 576])
def test_a_row_gives_the_same_bits_at_every_place_of_every_tile(isa: str, code: str, columns: int) -> None:
    rng = np.random.default_rng(columns)
    weight = plain_weight(rng.normal(size=(32, columns)).astype(np.float32), code)
    largest = _native.plain_tile_rows(isa, weight.packed)
    x = rng.normal(size=(2 * largest + 1, columns)).astype(np.float32)
    alone = np.concatenate([_native.plain_linear(isa, weight.packed, row[None], 1) for row in x])
    for rows in range(1, largest + 1):
        np.testing.assert_array_equal(
            _native.plain_linear(isa, weight.packed, x, rows).view(np.int32), alone.view(np.int32)
        )


@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("columns", [100, 66, 576])
def test_what_is_not_finite_stays_in_its_row(isa: str, code: str, columns: int, poison: float) -> None:
    rng = np.random.default_rng(7)
    weight = plain_weight(rng.normal(size=(32, columns)).astype(np.float32), code)
    x = rng.normal(size=(4, columns)).astype(np.float32)
    rows = min(4, _native.plain_tile_rows(isa, weight.packed))
    clean = _native.plain_linear(isa, weight.packed, x, rows)
    for column in (0, columns // 2, columns - 1):
        bad = x.copy()
        bad[2, column] = poison
        out = _native.plain_linear(isa, weight.packed, bad, rows)
        assert not np.isfinite(out[2]).any()
        np.testing.assert_array_equal(np.delete(out, 2, axis=0), np.delete(clean, 2, axis=0))


def test_a_row_of_zeros_gives_zeros(isa: str, code: str) -> None:
    weight = plain_weight(np.ones((32, 40), np.float32), code)
    assert not _native.plain_linear(isa, weight.packed, np.zeros((3, 40), np.float32), 1).any()


def test_what_a_kernel_must_not_be_given_is_refused(isa: str, code: str) -> None:
    weight = plain_weight(np.ones((32, 40), np.float32), code)
    with pytest.raises(ValueError, match="must have 40"):
        _native.plain_linear(isa, weight.packed, np.ones((3, 39), np.float32), 1)
    largest = _native.plain_tile_rows(isa, weight.packed)
    for rows in (0, -1, largest + 1):
        with pytest.raises(ValueError, match=f"allowed: 1 to {largest}"):
            _native.plain_linear(isa, weight.packed, np.ones((3, 40), np.float32), rows)
    with pytest.raises(ValueError, match="packed has"):
        activation = "bfloat16" if code == "bfloat16" else "float32"
        _native.PackedBytes(np.zeros(100, np.uint8), code, activation, "none", 0, False, 32, 40, False)
