from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from topg.precision.scale_search import (
    SYMMETRIC_CODES,
    UNSIGNED_CODES,
    asymmetric_int4_scales,
    nearest_codes,
    symmetric_int4_scales,
)
from topg.precision.storage import rounded

DISTRIBUTIONS: dict[str, Callable[[np.random.Generator, int], np.ndarray]] = {
    "gaussian": lambda rng, size: rng.standard_normal(size),
    "student t, 4 degrees": lambda rng, size: rng.standard_t(4, size),
    "laplace": lambda rng, size: rng.laplace(size=size),
}


def random_lanes(distribution: str) -> np.ndarray:
    values = DISTRIBUTIONS[distribution](np.random.default_rng(0), 32 * 4096)
    return values.astype(np.float32).reshape(32, -1)


def squared_errors(
    lanes: np.ndarray, scales: np.ndarray, minimums: np.ndarray | None, limits: tuple[int, int]
) -> np.ndarray:
    codes = nearest_codes(lanes, scales, minimums, limits)
    offset = 0 if minimums is None else minimums
    return np.square(codes.astype(float) * scales + offset - lanes).sum(axis=0)


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_the_search_beats_plain_scales(distribution: str) -> None:
    lanes = random_lanes(distribution)
    largest = np.abs(lanes).max(axis=0)
    searched = squared_errors(lanes, symmetric_int4_scales(lanes, "float16"), None, SYMMETRIC_CODES)
    plain = squared_errors(lanes, symmetric_int4_scales(lanes, "float16", search=False), None, SYMMETRIC_CODES)
    sevenths = squared_errors(lanes, rounded(largest / np.float32(7), "float16"), None, SYMMETRIC_CODES)
    assert searched.sum() < 0.93 * plain.sum()
    assert searched.sum() < 0.75 * sevenths.sum()


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_the_search_comes_close_to_trying_every_scale(distribution: str) -> None:
    lanes = random_lanes(distribution)[:, :512]
    largest = np.abs(lanes).max(axis=0)
    every = (rounded(largest / np.float32(code), "float16") for code in np.arange(-12, 12, 0.05) if abs(code) > 5)
    best = np.min([squared_errors(lanes, scales, None, SYMMETRIC_CODES) for scales in every], axis=0)
    searched = squared_errors(lanes, symmetric_int4_scales(lanes, "float16"), None, SYMMETRIC_CODES)
    assert searched.sum() < 1.01 * best.sum()


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_the_search_beats_plain_ranges(distribution: str) -> None:
    lanes = random_lanes(distribution)
    searched = squared_errors(lanes, *asymmetric_int4_scales(lanes, "float16"), UNSIGNED_CODES)
    plain = squared_errors(lanes, *asymmetric_int4_scales(lanes, "float16", search=False), UNSIGNED_CODES)
    assert searched.sum() < 0.88 * plain.sum()


GROUPS = hnp.arrays(np.float32, (32, 3), elements=st.floats(-1e4, 1e4, width=32))


@settings(max_examples=50, deadline=None)
@given(GROUPS)
def test_no_group_gets_worse(lanes: np.ndarray) -> None:
    searched = squared_errors(lanes, symmetric_int4_scales(lanes, "float16"), None, SYMMETRIC_CODES)
    plain = squared_errors(lanes, symmetric_int4_scales(lanes, "float16", search=False), None, SYMMETRIC_CODES)
    assert (searched <= plain * (1 + 1e-5)).all()
    searched = squared_errors(lanes, *asymmetric_int4_scales(lanes, "float16"), UNSIGNED_CODES)
    plain = squared_errors(lanes, *asymmetric_int4_scales(lanes, "float16", search=False), UNSIGNED_CODES)
    assert (searched <= plain * (1 + 1e-5)).all()


@settings(max_examples=50, deadline=None)
@given(GROUPS)
def test_a_group_does_not_depend_on_its_neighbours(lanes: np.ndarray) -> None:
    alone = np.ascontiguousarray(lanes[:, 1:2])
    assert symmetric_int4_scales(alone, "float16")[0] == symmetric_int4_scales(lanes, "float16")[1]
    for one, of_three in zip(
        asymmetric_int4_scales(alone, "float16"), asymmetric_int4_scales(lanes, "float16"), strict=True
    ):
        assert one.tobytes() == of_three[1:2].tobytes()


def test_four_bit_weights_come_back_exactly() -> None:
    codes = np.random.default_rng(4).integers(-8, 8, (32, 100)).astype(np.float32)
    codes[0] = -8
    lanes = codes * np.float32(0.125)
    scales = symmetric_int4_scales(lanes, "float16")
    assert np.array_equal(nearest_codes(lanes, scales, None, SYMMETRIC_CODES) * scales, lanes)


def test_scales_are_those_that_are_stored() -> None:
    lanes = random_lanes("gaussian")[:, :64]
    for stored in ("float16", "bfloat16"):
        scales = symmetric_int4_scales(lanes, stored)
        assert np.array_equal(scales, rounded(scales, stored))


def test_groups_of_zeros_have_scale_zero_and_codes_zero() -> None:
    lanes = np.zeros((32, 2), np.float32)
    scales = symmetric_int4_scales(lanes, "float16")
    assert not scales.any()
    assert not nearest_codes(lanes, scales, None, SYMMETRIC_CODES).any()
