from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from topg.errors import PrecisionError
from topg.precision.rotation import hadamard


def documented_order(run: np.ndarray) -> np.ndarray:
    """The butterflies one value at a time, as the module's docstring has them."""
    values, stride = run.copy(), 1
    while stride < len(values):
        for low in range(len(values)):
            if not low & stride:
                high = low + stride
                values[low], values[high] = values[low] + values[high], values[low] - values[high]
        stride *= 2
    return values * np.float32(1 / np.sqrt(len(values)))


def test_follows_the_documented_order_bit_for_bit() -> None:
    values = np.random.default_rng(1).standard_normal((3, 128)).astype(np.float32)
    expected = np.stack([documented_order(run) for run in values.reshape(-1, 64)]).reshape(values.shape)
    assert np.array_equal(hadamard(values), expected)


@given(st.integers(0, 8), st.integers(0, 2**32 - 1))
def test_is_its_own_inverse_and_keeps_the_length(log_group: int, seed: int) -> None:
    group = 1 << log_group
    values = np.random.default_rng(seed).standard_normal((2, 3 * group)).astype(np.float32)
    rotated = hadamard(values, group)
    assert np.allclose(hadamard(rotated, group), values, atol=1e-5)
    assert np.allclose(np.linalg.norm(rotated, axis=1), np.linalg.norm(values, axis=1), rtol=1e-5)


def test_is_the_walsh_hadamard_matrix() -> None:
    signs = [[(-1) ** (i & j).bit_count() for j in range(64)] for i in range(64)]
    assert np.array_equal(hadamard(np.eye(64, dtype=np.float32)), np.array(signs, np.float32) / 8)


def test_products_do_not_change() -> None:
    weights, inputs = np.random.default_rng(2).standard_normal((2, 192)).astype(np.float32)
    assert np.isclose(hadamard(weights) @ hadamard(inputs), weights @ inputs, rtol=1e-4)


def test_a_run_does_not_depend_on_its_neighbours() -> None:
    values = np.random.default_rng(3).standard_normal((1500, 64)).astype(np.float32)
    assert np.array_equal(hadamard(values)[1100:1101], hadamard(values[1100:1101]))


def test_leaves_its_input_alone() -> None:
    values = np.ones((1, 64), np.float32)
    hadamard(values)
    assert np.array_equal(values, np.ones((1, 64)))


@pytest.mark.parametrize(("columns", "group"), [(100, 64), (96, 48), (64, 0)])
def test_refuses_what_cannot_be_cut_into_runs(columns: int, group: int) -> None:
    with pytest.raises(PrecisionError, match=str(group)):
        hadamard(np.zeros((1, columns), np.float32), group)
