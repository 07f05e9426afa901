"""Packing, and linears whose weights are codes with scales per group, on every instruction set of this machine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from support.packed_weights import plain_weight
from topg import _native
from topg.precision.bfloat16 import from_bfloat16, to_bfloat16

Floats = NDArray[np.float32]
ISAS = _native.usable_isas()


@dataclass(frozen=True)
class Format:
    code: str
    scale: str
    group: int
    minimum: bool = False
    activation: str = "int8"

    def __str__(self) -> str:
        return f"{self.code}-{self.scale}-{self.group}{'-min' * self.minimum}-{self.activation}"

    def codes(self, rng: np.random.Generator, shape: tuple[int, ...]) -> NDArray[np.int8]:
        """As they are meant: int4 without minimums is -8..7."""
        low, high = (-128, 128) if self.code == "int8" else (0, 16) if self.minimum else (-8, 8)
        return rng.integers(low, high, shape).astype(np.int8)

    def stored(self, codes: NDArray[np.int8]) -> NDArray[Any]:
        """Codes [rows, columns] as a checkpoint holds them."""
        if self.code == "int8":
            return codes
        nibbles = (codes + (0 if self.minimum else 8)).astype(np.uint8)
        return np.ascontiguousarray(nibbles[:, ::2] | nibbles[:, 1::2] << 4)

    def stored_scales(self, values: Floats) -> tuple[NDArray[Any], Floats]:
        """What is stored, and what that means."""
        if self.scale == "bfloat16":
            patterns = to_bfloat16(values)
            return patterns, from_bfloat16(patterns)
        stored = values.astype(self.scale)
        return stored, stored.astype(np.float32)


INT8_ACTIVATIONS = [
    Format("int8", "bfloat16", 64),
    Format("int8", "bfloat16", 32),
    Format("int8", "float16", 32),
    Format("int8", "float16", 32, minimum=True),
    Format("int8", "float32", 32, minimum=True),
    Format("int8", "float32", 16),
    Format("int4", "bfloat16", 32),
    Format("int4", "float16", 32),
    Format("int4", "float16", 32, minimum=True),
    Format("int4", "float32", 32),
    Format("int4", "float32", 32, minimum=True),
]
WEIGHT_ONLY = Format("int8", "bfloat16", 64, activation="bfloat16")
FORMATS = [*INT8_ACTIVATIONS, WEIGHT_ONLY]
# (channels, columns): single ones, around a block, columns that are no whole groups, odd and even numbers of groups.
SHAPES = [(1, 1), (31, 64), (33, 100), (64, 576), (95, 320)]

by_isa = pytest.mark.parametrize("isa", ISAS)
by_format = pytest.mark.parametrize("form", INT8_ACTIVATIONS, ids=str)


@dataclass(frozen=True)
class Case:
    """A random weight and rows to multiply it with."""

    form: Format
    weight: _native.LinearWeight
    codes: NDArray[np.int8]  # [channels, groups, group]
    scales: Floats  # [channels, groups]
    minimums: Floats | None
    x: NDArray[np.int8]  # [rows, columns]
    x_scales: Floats  # [rows, groups]

    def run(self, isa: str, rows: slice = slice(None), max_rows: int = 0) -> Floats:
        return _native.linear(isa, self.weight, self.x[rows], self.x_scales[rows], max_rows)


def make_case(form: Format, channels: int, columns: int, rows: int, extreme: bool = False) -> Case:
    rng = np.random.default_rng([channels, columns, rows])
    groups = -(-columns // form.group)
    codes = form.codes(rng, (channels, groups * form.group))
    x = rng.integers(-127, 128, (rows, groups * form.group)).astype(np.int8)
    if extreme:  # every product of a group as large as it can be, of either sign
        signs = rng.integers(0, 2, (channels, 1)), rng.integers(0, 2, (rows, 1))
        codes = np.where(signs[0] == 0, codes.min(), codes.max()).astype(np.int8).repeat(codes.shape[1], axis=1)
        x = np.where(signs[1] == 0, -128, 127).astype(np.int8).repeat(x.shape[1], axis=1)
    codes[:, columns:] = 0
    stored, scales = form.stored_scales(rng.uniform(0.001, 1, (channels, groups)).astype(np.float32))
    stored_minimums, minimums = form.stored_scales(rng.normal(size=(channels, groups)).astype(np.float32))
    parts = (form.stored(codes), stored, stored_minimums if form.minimum else None)
    weight = _native.LinearWeight(
        form.code, form.activation, form.scale, form.group, form.minimum, channels, columns, [parts]
    )
    x_scales = rng.uniform(0.001, 1, (rows, groups)).astype(np.float32)
    grouped = codes.reshape(channels, groups, form.group)
    return Case(form, weight, grouped, scales, minimums if form.minimum else None, x, x_scales)


def fma(a: Floats, b: Floats, c: Floats) -> Floats:
    """a * b + c rounded once (but for some sums that lie within 2^-53 of the middle between two float32 numbers)."""
    product: Floats = (a.astype(np.float64) * b + c).astype(np.float32)
    return product


def reference(case: Case) -> Floats:
    """Integers exactly, then float32 group after group, the same operations as the kernels'."""
    x = case.x.reshape(len(case.x), -1, case.form.group).astype(np.int32)
    total = np.zeros((len(x), len(case.codes)), np.float32)
    for group in range(x.shape[1]):
        dots = x[:, group] @ case.codes[:, group].astype(np.int32).T
        x_scale = case.x_scales[:, group, None]
        total = fma(dots.astype(np.float32), x_scale * case.scales[:, group], total)
        if case.minimums is not None:
            sums = x[:, group].sum(axis=1, keepdims=True).astype(np.float32)
            total = fma(x_scale * sums, case.minimums[:, group], total)
    return total


def assert_same_bits(left: Floats, right: Floats) -> None:
    np.testing.assert_array_equal(left.view(np.int32), right.view(np.int32))


# ---- packing ----


@pytest.mark.parametrize("form", FORMATS, ids=str)
@pytest.mark.parametrize("channels", [1, 33, 64])
def test_packed_codes_unpack_to_the_values_stored(form: Format, channels: int) -> None:
    columns = 2 * form.group
    rng = np.random.default_rng(1)
    codes = form.codes(rng, (channels, columns))
    scales, meant = form.stored_scales(rng.uniform(0.1, 1, (channels, 2)).astype(np.float32))
    minimums, meant_minimums = form.stored_scales(rng.normal(size=(channels, 2)).astype(np.float32))
    parts = (form.stored(codes), scales, minimums if form.minimum else None)
    spec = (form.code, form.activation, form.scale, form.group, form.minimum)
    packed = _native.LinearWeight(*spec, channels, columns, [parts]).packed()
    out = _native.row_unpack("scalar", _native.PackedBytes(packed, *spec, channels, columns, False))
    expected = codes * meant.repeat(form.group, axis=1)
    if form.minimum:
        expected = expected + meant_minimums.repeat(form.group, axis=1)
    np.testing.assert_array_equal(out, expected.astype(np.float32))


@pytest.mark.parametrize("code", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize(("channels", "columns"), [(1, 1), (32, 64), (33, 7), (70, 33)])
def test_packed_numbers_multiply_as_numbers(code: str, channels: int, columns: int) -> None:
    rng = np.random.default_rng(2)
    values = rng.normal(size=(channels, columns)).astype(np.float32)
    stored = to_bfloat16(values) if code == "bfloat16" else values.astype(code)
    activation = "bfloat16" if code == "bfloat16" else "float32"
    weight = _native.LinearWeight(code, activation, "none", 0, False, channels, columns, [(stored, None, None)])
    example = plain_weight(values, code)
    eye = np.eye(columns, dtype=np.float32)
    expected = _native.plain_linear("scalar", example.packed, eye, 1)
    padded = columns + (columns % 2 if code == "bfloat16" else 0)
    rows = np.pad(eye, ((0, 0), (0, padded - columns)))
    out = _native.linear("scalar", weight, to_bfloat16(rows) if code == "bfloat16" else rows)
    np.testing.assert_array_equal(out, expected)


@pytest.mark.parametrize("rows", [1, 15, 16, 17, 40])
def test_two_sources_are_interleaved_16_by_16(rows: int) -> None:
    form = INT8_ACTIVATIONS[0]
    rng = np.random.default_rng(rows)
    gate, up = ((form.codes(rng, (rows, 64)), np.ones((rows, 1), np.float32)) for _ in range(2))
    sources = [(codes, to_bfloat16(scales), None) for codes, scales in (gate, up)]
    weight = _native.LinearWeight("int8", "int8", "bfloat16", 64, False, rows, 64, sources)
    blocks = -(-rows // 16)
    assert weight.channels == 32 * blocks
    x = rng.integers(-127, 128, (1, 64)).astype(np.int8)
    out = _native.linear("scalar", weight, x, np.ones((1, 1), np.float32)).reshape(blocks, 2, 16)
    for index, (codes, _) in enumerate((gate, up)):
        np.testing.assert_array_equal(out[:, index].reshape(-1)[:rows], codes.astype(np.int32) @ x[0].astype(np.int32))
        assert not out[:, index].reshape(-1)[rows:].any()


# ---- int8 activations ----


@by_isa
@by_format
@pytest.mark.parametrize(("channels", "columns"), SHAPES)
def test_products_are_the_exact_ones(isa: str, form: Format, channels: int, columns: int) -> None:
    case = make_case(form, channels, columns, rows=40)
    expected = reference(case)
    for rows in (1, 2, 7, 8, 15, 16, 17, 33, 40):
        assert_same_bits(case.run(isa, slice(rows)), expected[:rows])


@by_isa
@by_format
def test_the_largest_codes_overflow_nothing(isa: str, form: Format) -> None:
    case = make_case(form, 48, 4 * form.group, rows=20, extreme=True)
    assert_same_bits(case.run(isa), reference(case))


@by_isa
@by_format
def test_a_row_gives_the_same_bits_at_every_place_of_every_tile(isa: str, form: Format) -> None:
    case = make_case(form, 32, 5 * form.group, rows=40)
    alone = np.concatenate([case.run(isa, slice(row, row + 1)) for row in range(40)])
    largest = _native.linear_kernel(isa, form.code, form.activation, form.scale, form.group, form.minimum)[1]
    for max_rows in range(1, largest + 1):
        assert_same_bits(case.run(isa, max_rows=max_rows), alone)


@by_isa
@by_format
def test_what_is_not_finite_stays_in_its_row(isa: str, form: Format) -> None:
    case = make_case(form, 40, 3 * form.group, rows=10)
    clean = case.run(isa)
    case.x_scales[4, 1] = np.nan
    out = case.run(isa)
    assert np.isnan(out[4]).all()
    assert_same_bits(np.delete(out, 4, axis=0), np.delete(clean, 4, axis=0))


@by_isa
def test_rows_of_zeros_give_zeros(isa: str) -> None:
    case = make_case(INT8_ACTIVATIONS[0], 40, 128, rows=9)
    case.x[:] = 0
    case.x_scales[:] = 0
    assert not case.run(isa).any()


# ---- bfloat16 activations ----


def weight_only_case(channels: int, columns: int, rows: int) -> tuple[_native.LinearWeight, Floats, NDArray[np.uint16]]:
    """A weight, its values [channels, padded columns], and activations."""
    rng = np.random.default_rng([channels, columns])
    groups = -(-columns // 64)
    codes = WEIGHT_ONLY.codes(rng, (channels, groups * 64))
    codes[:, columns:] = 0
    scales, meant = WEIGHT_ONLY.stored_scales(rng.uniform(0.001, 1, (channels, groups)).astype(np.float32))
    weight = _native.LinearWeight("int8", "bfloat16", "bfloat16", 64, False, channels, columns, [(codes, scales, None)])
    x = to_bfloat16(rng.normal(size=(rows, groups * 64)).astype(np.float32))
    return weight, codes * meant.repeat(64, axis=1), x


@by_isa
@pytest.mark.parametrize(("channels", "columns"), SHAPES)
def test_weight_only_products_agree_with_float64(isa: str, channels: int, columns: int) -> None:
    weight, values, x = weight_only_case(channels, columns, rows=9)
    numbers = from_bfloat16(x).astype(np.float64)
    error = np.abs(_native.linear(isa, weight, x) - numbers @ values.T)
    assert (error <= 70 * 2.0**-24 * (np.abs(numbers) @ np.abs(values).T)).all()


@by_isa
def test_a_weight_only_row_gives_the_same_bits_in_every_tile(isa: str) -> None:
    weight, _, x = weight_only_case(40, 320, rows=16)
    alone = np.concatenate([_native.linear(isa, weight, row[None]) for row in x])
    largest = _native.linear_kernel(isa, "int8", "bfloat16", "bfloat16", 64, False)[1]
    for max_rows in range(1, largest + 1):
        assert_same_bits(_native.linear(isa, weight, x, max_rows=max_rows), alone)


# ---- what is refused ----


@by_isa
def test_formats_without_a_kernel_have_no_name(isa: str) -> None:
    assert _native.linear_kernel(isa, "int8", "int8", "float32", 128, False) == ("", 0)
    assert _native.linear_kernel(isa, "int8", "float32", "bfloat16", 64, False) == ("", 0)


def test_what_does_not_fit_is_refused() -> None:
    codes, scales = np.zeros((4, 64), np.int8), np.zeros((4, 1), np.uint16)
    spec = ("int8", "int8", "bfloat16", 64, False)
    with pytest.raises(ValueError, match="values of a source have 256 bytes; they must have 320"):
        _native.LinearWeight(*spec, 5, 64, [(codes, scales, None)])
    with pytest.raises(ValueError, match="scales of a source have 0 bytes; they must have 8"):
        _native.LinearWeight(*spec, 4, 64, [(codes, None, None)])
    with pytest.raises(ValueError, match="minimums of a source have 8 bytes; they must have 0"):
        _native.LinearWeight(*spec, 4, 64, [(codes, scales, scales)])
    with pytest.raises(ValueError, match="1 source, or 2"):
        _native.LinearWeight(*spec, 4, 64, [])
    with pytest.raises(ValueError, match="must be positive"):
        _native.LinearWeight(*spec, -1, 64, [(codes, scales, None)])
    with pytest.raises(ValueError, match="group is 48; allowed: powers of two"):
        _native.LinearWeight("int8", "int8", "bfloat16", 48, False, 4, 64, [(codes, scales, None)])
    weight = _native.LinearWeight(*spec, 4, 64, [(codes, scales, None)])
    ones = np.ones((2, 1), np.float32)
    with pytest.raises(ValueError, match=r"must be \[rows, 64\]"):
        _native.linear("scalar", weight, np.zeros((2, 63), np.int8), ones)
    with pytest.raises(ValueError, match="values must be int8"):
        _native.linear("scalar", weight, np.zeros((2, 64), np.float32), ones)
    with pytest.raises(ValueError, match=r"scales must be \[rows, groups\]"):
        _native.linear("scalar", weight, np.zeros((2, 64), np.int8), np.ones((2, 2), np.float32))
    with pytest.raises(ValueError, match="int8 activations have scales"):
        _native.linear("scalar", weight, np.zeros((2, 64), np.int8))
    with pytest.raises(ValueError, match="max_rows is -1; allowed"):
        _native.linear("scalar", weight, np.zeros((2, 64), np.int8), ones, -1)
