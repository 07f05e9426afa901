from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from topg.errors import PrecisionError
from topg.precision.bfloat16 import from_bfloat16
from topg.precision.formats import (
    BFLOAT16,
    FLOAT16,
    FLOAT32,
    INT4,
    INT8_PLAIN,
    INT8_ROTATED,
    INT8_WEIGHT_ONLY,
    Precision,
)
from topg.precision.quantise import dequantise, quantise, quantise_rows
from topg.precision.rotation import hadamard
from topg.precision.storage import allocate, numpy_dtype, unpack_nibbles

INT4_MINIMUM = replace(INT4, minimum=True)
INT8_MINIMUM = replace(INT8_PLAIN, minimum=True)
GROUPED = [
    INT8_WEIGHT_ONLY,
    INT8_ROTATED,
    INT8_PLAIN,
    INT8_MINIMUM,
    replace(INT8_ROTATED, minimum=True),
    replace(INT8_ROTATED, group_size=128, scale="float32"),
    INT4,
    INT4_MINIMUM,
    replace(INT4, rotated=True, group_size=64, scale="bfloat16"),
]
PRECISIONS = [FLOAT32, FLOAT16, BFLOAT16, *GROUPED]

each = pytest.mark.parametrize("precision", PRECISIONS, ids=Precision.describe)
each_grouped = pytest.mark.parametrize("precision", GROUPED, ids=Precision.describe)


def weights(rows: int, columns: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((rows, columns)).astype(np.float32)


def relative_error(values: np.ndarray, precision: Precision) -> float:
    restored = dequantise(quantise(values, precision), precision, values.shape)
    return float(np.linalg.norm(restored - values) / np.linalg.norm(values))


@each
def test_parts_are_as_the_precision_says(precision: Precision) -> None:
    parts = quantise(weights(3, 200), precision)
    expected = precision.parts((3, 200))
    assert list(parts) == list(expected)
    for name, part in expected.items():
        assert parts[name].shape == part.shape
        assert parts[name].dtype == numpy_dtype(part.dtype)


@each
@settings(max_examples=15, deadline=None)
@given(rows=st.integers(1, 7), columns=st.integers(1, 200), cut=st.integers(0, 7), seed=st.integers(0, 1000))
def test_blocks_of_rows_give_the_bits_of_the_whole(
    precision: Precision, rows: int, columns: int, cut: int, seed: int
) -> None:
    values = weights(rows, columns, seed)
    whole, pieces = quantise(values, precision), allocate(precision, values.shape)
    for block in (slice(0, cut), slice(cut, rows)):
        quantise_rows(values[block], precision, {name: part[block] for name, part in pieces.items()})
    assert all(whole[name].tobytes() == pieces[name].tobytes() for name in whole)


@each
def test_a_large_tensor_gives_the_bits_of_its_rows(precision: Precision) -> None:
    values = weights(700, 300)
    whole, row = quantise(values, precision), quantise(values[613:614], precision)
    assert all(whole[name][613:614].tobytes() == row[name].tobytes() for name in whole)


@each
def test_strided_rows_give_the_same_bits(precision: Precision) -> None:
    values = weights(5, 128)
    strided, plain = quantise(np.asfortranarray(values), precision), quantise(values, precision)
    assert all(strided[name].tobytes() == plain[name].tobytes() for name in plain)


@pytest.mark.parametrize(
    ("precision", "bound"),
    [
        (FLOAT32, 0),
        (FLOAT16, 0.0003),
        (BFLOAT16, 0.002),
        (INT8_PLAIN, 0.007),
        (INT8_MINIMUM, 0.007),
        (INT8_ROTATED, 0.007),
        (INT4, 0.085),
        (INT4_MINIMUM, 0.075),
    ],
    ids=lambda value: value.describe() if isinstance(value, Precision) else str(value),
)
def test_error_on_gaussian_weights(precision: Precision, bound: float) -> None:
    assert relative_error(weights(64, 512), precision) <= bound


def test_rotation_spreads_outliers() -> None:
    values = weights(64, 512)
    values[::2, ::50] *= 40
    assert relative_error(values, INT8_ROTATED) < 0.4 * relative_error(values, INT8_PLAIN)


@each_grouped
def test_codes_are_the_nearest_for_the_stored_scale(precision: Precision) -> None:
    values = weights(16, 256)
    parts = quantise(values, precision)
    rotated = hadamard(values) if precision.rotated else values
    restored = dequantise(parts, replace(precision, rotated=False), values.shape)
    scales = parts["scales"] if precision.scale != "bfloat16" else from_bfloat16(parts["scales"])
    steps = np.repeat(np.abs(scales.astype(np.float32)), precision.group_size, axis=1)
    beyond = 0.51 if precision.weights == "int8" else 1.6  # 4-bit scales may clip the extreme values
    assert (np.abs(restored - rotated) <= beyond * steps).all()


def test_int8_exact_bits() -> None:
    values = np.zeros((1, 64), np.float32)
    values[0, :4] = [127, -63.5, 1.5, 2.5]
    parts = quantise(values, INT8_PLAIN)
    assert parts["scales"].tolist() == [[0x3F80]]
    assert parts["codes"][0, :5].tolist() == [127, -64, 2, 2, 0]  # ties to even


def test_int8_uses_the_rounded_scale() -> None:
    values = np.full((1, 64), 127 * (1 + 2**-9), np.float32)  # its scale rounds down to 1 in bfloat16
    values[0, 1] = 100.4
    parts = quantise(values, INT8_PLAIN)
    assert from_bfloat16(parts["scales"])[0, 0] == 1
    assert parts["codes"][0, :2].tolist() == [127, 100]


def test_int8_never_uses_minus_128() -> None:
    values = np.array([[-1.0] * 64, [-3e38] * 64, [-1e-40] * 64], np.float32)
    assert quantise(values, replace(INT8_PLAIN, scale="float32"))["codes"].min() == -127


def test_int4_nibble_order() -> None:
    values = np.zeros((1, 32), np.float32)
    values[0, :4] = [-8, 7, 3, -1]
    parts = quantise(values, INT4)
    assert parts["scales"].tolist() == [[1]]
    assert parts["codes"][0, :3].tolist() == [0xF0, 0x7B, 0x88]


def test_int4_extreme_value_gets_minus_eight_whatever_its_sign() -> None:
    values = np.zeros((1, 32), np.float32)
    values[0, :2] = [8, -7]
    parts = quantise(values, INT4)
    assert parts["scales"].tolist() == [[-1]]
    assert unpack_nibbles(parts["codes"])[0, :3].tolist() == [0, 15, 8]


def test_int4_with_a_minimum_uses_codes_from_zero() -> None:
    values = np.arange(16, dtype=np.float32).repeat(2).reshape(1, 32) + 5
    parts = quantise(values, INT4_MINIMUM)
    assert parts["scales"].tolist() == [[1]]
    assert parts["minimums"].tolist() == [[5]]
    assert unpack_nibbles(parts["codes"])[0].tolist() == [code for code in range(16) for _ in range(2)]


def test_the_last_group_is_filled_up_with_zeros() -> None:
    parts = quantise(weights(2, 65), INT8_PLAIN)
    assert parts["codes"].shape == (2, 128)
    assert not parts["codes"][:, 65:].any()


@each_grouped
def test_groups_of_zeros(precision: Precision) -> None:
    values = weights(2, 256)
    values[1] = 0
    restored = dequantise(quantise(values, precision), precision, values.shape)
    assert not restored[1].any()


@each
@pytest.mark.parametrize("shape", [(1, 64), (3, 192)])
def test_leaves_the_weights_alone(precision: Precision, shape: tuple[int, int]) -> None:
    values = weights(*shape)
    before = values.copy()
    quantise(values, precision)
    assert np.array_equal(values, before)


def test_search_can_be_switched_off() -> None:
    values = weights(8, 256)
    plain, searched = allocate(INT4, values.shape), quantise(values, INT4)
    quantise_rows(values, INT4, plain, search=False)
    errors = [np.linalg.norm(dequantise(parts, INT4, values.shape) - values) for parts in (plain, searched)]
    assert errors[1] < 0.97 * errors[0]


@pytest.mark.parametrize("precision", [FLOAT32, FLOAT16, BFLOAT16], ids=Precision.describe)
@pytest.mark.parametrize("shape", [(), (5,), (2, 3, 4)])
def test_plain_formats_take_any_shape(precision: Precision, shape: tuple[int, ...]) -> None:
    values = np.full(shape, 1.5, np.float32)
    assert np.array_equal(dequantise(quantise(values, precision), precision, shape), values)


@each
@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf])
def test_says_where_a_weight_is_not_finite(precision: Precision, wrong: float) -> None:
    values = weights(5000, 100)
    values[4321, 77] = wrong
    with pytest.raises(PrecisionError, match=r"weight at \[4321, 77\] is -?(nan|inf)"):
        quantise(values, precision)


def test_says_where_in_the_whole_tensor_a_block_is_wrong() -> None:
    values = weights(3, 64)
    values[2, 5] = np.nan
    with pytest.raises(PrecisionError, match=r"\[102, 5\]"):
        quantise_rows(values, INT8_PLAIN, allocate(INT8_PLAIN, values.shape), first_row=100)


@pytest.mark.parametrize(
    ("precision", "advice"),
    [(FLOAT16, "bfloat16"), (BFLOAT16, "float32"), (INT4, "bfloat16"), (INT8_ROTATED, "bfloat16")],
)
def test_weights_too_large_for_a_format(precision: Precision, advice: str) -> None:
    values = np.full((2, 64), 3.402e38 if precision != FLOAT16 else 65520, np.float32)
    with pytest.raises(PrecisionError, match=f"too large.*store this tensor as {advice}"):
        quantise(values, precision)


@pytest.mark.parametrize(
    ("precision", "shape", "message"),
    [
        (replace(INT8_PLAIN, group_size=48), (2, 96), "group_size is 48; it must be a power of two"),
        (replace(INT8_ROTATED, group_size=32), (2, 64), "multiple of 64"),
        (INT8_PLAIN, (64,), r"stores matrices; a tensor of shape \[64\]"),
        (replace(INT8_PLAIN, group_size=None), (2, 64), "need a group_size"),
        (replace(BFLOAT16, group_size=32, scale="float32"), (2, 64), "int8 or int4"),
    ],
)
def test_refuses_what_it_cannot_store(precision: Precision, shape: tuple[int, ...], message: str) -> None:
    with pytest.raises(PrecisionError, match=message):
        quantise(np.zeros(shape, np.float32), precision)


def test_refuses_other_types_than_float32() -> None:
    with pytest.raises(PrecisionError, match="float64"):
        quantise(np.zeros((1, 64)), INT8_PLAIN)


def test_dequantise_refuses_parts_that_do_not_fit() -> None:
    parts = quantise(weights(2, 64), INT8_PLAIN)
    with pytest.raises(PrecisionError, match="codes, scales; given: scales"):
        dequantise({"scales": parts["scales"]}, INT8_PLAIN, (2, 64))
    with pytest.raises(PrecisionError, match="part 'codes'"):
        dequantise(parts, INT8_PLAIN, (3, 64))
    with pytest.raises(PrecisionError, match="stores matrices"):
        dequantise(parts, INT8_PLAIN, (128,))
    with pytest.raises(PrecisionError, match="part 'codes'"):
        dequantise({**parts, "codes": parts["codes"].view(np.uint8)}, INT8_PLAIN, (2, 64))
