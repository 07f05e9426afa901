from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from topg.precision.bfloat16 import from_bfloat16, to_bfloat16


def floats(*bits: int) -> np.ndarray:
    return np.array(bits, np.uint32).view(np.float32)


@pytest.mark.parametrize(
    ("bits", "pattern"),
    [
        (0x3F800000, 0x3F80),  # 1
        (0x3F807FFF, 0x3F80),  # just below half: down
        (0x3F808000, 0x3F80),  # half, even below: down
        (0x3F818000, 0x3F82),  # half, odd below: up
        (0x3F808001, 0x3F81),  # just above half: up
        (0x3FFFFFFF, 0x4000),  # the carry reaches the exponent
        (0x80000000, 0x8000),  # -0
        (0x00000001, 0x0000),  # the smallest subnormal
        (0x7F7FFFFF, 0x7F80),  # the largest float32 becomes infinite
        (0x7F800000, 0x7F80),
        (0xFF800000, 0xFF80),
    ],
)
def test_rounds_to_nearest_even(bits: int, pattern: int) -> None:
    assert to_bfloat16(floats(bits))[0] == pattern


@pytest.mark.parametrize("bits", [0x7F800001, 0x7FFFFFFF, 0xFF800001, 0xFFFFFFFF, 0x7FC00000])
def test_nan_stays_nan_and_keeps_its_sign(bits: int) -> None:
    pattern = to_bfloat16(floats(bits))
    assert np.isnan(from_bfloat16(pattern)[0])
    assert pattern[0] >> 15 == bits >> 31


def test_every_pattern_comes_back() -> None:
    patterns = np.arange(1 << 16, dtype=np.uint32).astype(np.uint16)
    values = from_bfloat16(patterns)
    numbers = ~np.isnan(values)
    assert np.array_equal(to_bfloat16(values)[numbers], patterns[numbers])


@given(st.floats(width=32, allow_nan=False, min_value=-(2.0**126), max_value=2.0**126))
def test_no_bfloat16_is_nearer(value: float) -> None:
    pattern = to_bfloat16(np.array([value], np.float32))
    error = abs(float(from_bfloat16(pattern)[0]) - value)
    for neighbour in (pattern - np.uint16(1), pattern + np.uint16(1)):
        other = abs(float(from_bfloat16(neighbour)[0]) - value)
        assert error <= other or np.isnan(other)


def test_keeps_the_shape_and_reads_strided_arrays() -> None:
    values = np.arange(24, dtype=np.float32).reshape(4, 6)
    assert np.array_equal(from_bfloat16(to_bfloat16(values.T)), values.T)
    assert to_bfloat16(np.float32(2).reshape(())).shape == ()
    assert to_bfloat16(np.empty((0, 3), np.float32)).shape == (0, 3)


def test_blocks_do_not_show() -> None:
    values = np.random.default_rng(0).standard_normal(200_003).astype(np.float32)
    assert np.array_equal(to_bfloat16(values)[70_000:], to_bfloat16(values[70_000:]))
