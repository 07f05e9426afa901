"""Work on single rows, on every instruction set of this machine."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray

from support.packed_weights import grouped_example, plain_weight
from topg import _native
from topg.precision.bfloat16 import to_bfloat16
from topg.precision.rotation import hadamard

pytestmark = pytest.mark.parametrize("isa", _native.usable_isas())

Floats = NDArray[np.float32]

WIDTHS = [1, 7, 15, 16, 17, 64, 100, 576, 1000]
_erf = np.vectorize(math.erf)
FUNCTIONS: dict[str, Callable[[NDArray[np.float64]], NDArray[np.float64]]] = {
    "silu": lambda x: x / (1 + np.exp(-x)),
    "gelu": lambda x: 0.5 * x * (1 + _erf(x * math.sqrt(0.5))),
    "gelu_tanh": lambda x: 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
    "relu": lambda x: np.maximum(x, 0),
}


def _rows(seed: int, rows: int, width: int) -> Floats:
    return np.random.default_rng(seed).normal(size=(rows, width)).astype(np.float32)


def _same_bits(left: NDArray[np.generic], right: NDArray[np.generic]) -> None:
    np.testing.assert_array_equal(left.view(np.uint8), right.view(np.uint8))


# ---- prepared activations ----


def _quantised(x: Floats, group: int) -> tuple[NDArray[np.int8], Floats]:
    """Codes and scales by division, as the oracle computes them."""
    groups = x.reshape(x.shape[0], -1, group)
    scales = np.abs(groups).max(axis=2) / np.float32(127)
    codes = np.rint(groups / np.where(scales == 0, np.float32(1), scales)[:, :, None])
    return codes.astype(np.int8).reshape(x.shape), scales


def _padded(x: Floats, columns: int) -> Floats:
    return np.pad(x, ((0, 0), (0, columns - x.shape[1])))


@pytest.mark.parametrize("rotated", [False, True])
@pytest.mark.parametrize(
    ("group", "dot_group"), [(64, 64), (32, 32), (16, 16), (64, 32), (32, 16), (256, 64), (128, 128)]
)
@pytest.mark.parametrize("columns", [64, 100, 576, 1000])
def test_int8_activations_are_those_of_the_oracle(
    isa: str, columns: int, group: int, dot_group: int, rotated: bool
) -> None:
    x = _rows(columns + group, 5, columns)
    x[1] *= 1e-20
    x[2, 1:] = 0
    unit = max(group, 64) if rotated else group
    padded = -(-columns // unit) * unit
    codes, scales, sums = _native.row_prepare(isa, x, "int8", group, dot_group, rotated, padded)
    values = hadamard(_padded(x, padded)) if rotated else _padded(x, padded)
    expected, expected_scales = _quantised(values, group)
    np.testing.assert_array_equal(scales, np.repeat(expected_scales, group // dot_group, axis=1))
    np.testing.assert_array_equal(sums, codes.reshape(5, -1, dot_group).sum(axis=2, dtype=np.int32))
    # A product with 127 / amax may round to the other side only where the quotient lies within 2e-5 of a half.
    different = codes != expected
    quotients = values.astype(np.float64) / np.repeat(expected_scales, group, axis=1).clip(1e-38)
    assert (np.abs(np.abs(quotients[different]) % 1 - 0.5) < 2.5e-5).all()
    assert (np.abs(codes.astype(int) - expected)[different] == 1).all()
    assert different.mean() < 0.001


@pytest.mark.parametrize("rotated", [False, True])
def test_float_activations_are_rounded_to_nearest_even(isa: str, rotated: bool) -> None:
    for columns, padded in ((1, 64), (100, 128), (576, 576), (1000, 1024)):
        x = _rows(columns, 3, columns)
        expected = _padded(x, padded)
        expected = hadamard(expected) if rotated else expected
        floats, _, _ = _native.row_prepare(isa, x, "float32", 0, 0, rotated, padded)
        _same_bits(floats, expected)
        patterns, _, _ = _native.row_prepare(isa, x, "bfloat16", 0, 0, rotated, padded)
        _same_bits(patterns, to_bfloat16(expected))


def test_bfloat16_rounds_ties_to_even_and_keeps_what_is_not_finite(isa: str) -> None:
    patterns = np.arange(0x3F80_0000, 0x3F84_0000, 0x800, dtype=np.uint32)  # every eighth of a step from 1 on
    special = np.array([0x7F80_0000, 0xFF80_0000, 0x7F7F_FFFF, 0x7F80_0001, 0xFFFF_FFFF], np.uint32)
    x = np.concatenate([patterns, special]).view(np.float32)[None]
    columns = x.shape[1]
    values, _, _ = _native.row_prepare(isa, x, "bfloat16", 0, 0, False, columns)
    _same_bits(values, to_bfloat16(x))


@pytest.mark.parametrize("columns", [96, 65, 33])
def test_columns_need_not_fill_the_last_group(isa: str, columns: int) -> None:
    """Weights in groups of 32 may end in the middle of a group of 64 activations."""
    x = _rows(columns, 2, columns)
    wanted = -(-columns // 32) * 32
    codes, scales, sums = _native.row_prepare(isa, x, "int8", 64, 32, False, wanted)
    whole = _native.row_prepare(isa, x, "int8", 64, 32, False, 128)
    _same_bits(codes, np.ascontiguousarray(whole[0][:, :wanted]))
    _same_bits(scales, np.ascontiguousarray(whole[1][:, : wanted // 32]))
    _same_bits(sums, np.ascontiguousarray(whole[2][:, : wanted // 32]))


@pytest.mark.parametrize(
    ("code", "group", "dot_group", "rotated", "piece"),
    [
        ("int8", 64, 64, True, 1),
        ("int8", 64, 32, False, 2),
        ("int8", 32, 32, True, 4),
        ("bfloat16", 0, 0, False, 3),
        ("float32", 0, 0, True, 1),
    ],
)
@pytest.mark.parametrize("columns", [576, 500])
def test_pieces_of_a_row_give_the_same_bits(
    isa: str, columns: int, code: str, group: int, dot_group: int, rotated: bool, piece: int
) -> None:
    x = _rows(3, 2, columns)
    whole = _native.row_prepare(isa, x, code, group, dot_group, rotated, 576)
    pieces = _native.row_prepare(isa, x, code, group, dot_group, rotated, 576, piece=piece)
    for left, right in zip(whole, pieces, strict=True):
        _same_bits(left, right)


@pytest.mark.parametrize("rotated", [False, True])
@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
def test_a_group_that_is_not_finite_gets_scale_nan(isa: str, poison: float, rotated: bool) -> None:
    clean = _rows(1, 1, 320)
    for column in (0, 77, 130, 319):
        x = clean.copy()
        x[0, column] = poison
        codes, scales, sums = _native.row_prepare(isa, x, "int8", 64, 64, rotated, 320)
        expected = _native.row_prepare(isa, clean, "int8", 64, 64, rotated, 320)
        others = np.arange(5) != column // 64
        assert np.isnan(scales[0, column // 64])
        np.testing.assert_array_equal(scales[0, others], expected[1][0, others])
        np.testing.assert_array_equal(sums[0, others], expected[2][0, others])
        np.testing.assert_array_equal(codes.reshape(5, 64)[others], expected[0].reshape(5, 64)[others])


def test_groups_of_zeros_and_denormals_have_scale_zero(isa: str) -> None:
    x = np.zeros((2, 64), np.float32)
    x[1] = 1e-40
    codes, scales, sums = _native.row_prepare(isa, x, "int8", 64, 64, False, 64)
    assert not codes.any() and not scales.any() and not sums.any()


def test_a_group_keeps_its_largest_value(isa: str) -> None:
    for magnitude in (1e-30, 1.0, 3e38):
        x = np.full((1, 64), magnitude, np.float32)
        x[0, 1::2] *= -1
        codes, scales, _ = _native.row_prepare(isa, x, "int8", 64, 64, False, 64)
        assert (np.abs(codes.astype(int)) == 127).all()
        np.testing.assert_allclose(scales * 127, magnitude, rtol=1e-6)


# ---- norms ----


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("affine", [False, True])
def test_norms_agree_with_float64(isa: str, width: int, affine: bool) -> None:
    x = _rows(width, 3, width) + np.float32(0.5)
    weight, bias = (_rows(1, 1, width)[0], _rows(2, 1, width)[0]) if affine else (None, None)
    exact = x.astype(np.float64)
    rms = exact / np.sqrt((exact**2).mean(axis=1, keepdims=True) + 1e-5)
    centred = exact - exact.mean(axis=1, keepdims=True)
    layer = centred / np.sqrt((centred**2).mean(axis=1, keepdims=True) + 1e-5)
    if weight is not None and bias is not None:
        rms, layer = rms * weight + bias, layer * weight + bias
    np.testing.assert_allclose(_native.row_rms_norm(isa, x, weight, bias, 1e-5), rms, rtol=2e-6, atol=2e-6)
    np.testing.assert_allclose(_native.row_layer_norm(isa, x, weight, bias, 1e-5), layer, rtol=1e-5, atol=1e-5)


def test_layer_norm_survives_a_large_mean(isa: str) -> None:
    """The variance is that of the centred values; a difference of two sums would lose it."""
    x = _rows(1, 1, 512) + np.float32(3000)
    exact = x.astype(np.float64) - x.astype(np.float64).mean()
    expected = exact / np.sqrt((exact**2).mean() + 1e-5)
    np.testing.assert_allclose(_native.row_layer_norm(isa, x, None, None, 1e-5), expected, atol=2e-3)


@pytest.mark.parametrize("width", [17, 64, 100])
@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_norms_do_not_hide_what_is_not_finite(isa: str, width: int, poison: float) -> None:
    for column in (0, width - 1):
        x = _rows(1, 2, width)
        x[0, column] = poison
        for norm in (_native.row_rms_norm, _native.row_layer_norm):
            out = norm(isa, x, None, None, 1e-5)
            assert np.isnan(out[0, column])
            assert np.isfinite(out[1]).all()


# ---- element by element ----


@pytest.mark.parametrize("name", FUNCTIONS)
def test_activation_functions_agree_with_float64(isa: str, name: str) -> None:
    x = np.concatenate([np.linspace(-12, 12, 4001), np.geomspace(1e-30, 1, 100), -np.geomspace(1e-30, 1, 100)])
    x = x.astype(np.float32)[None]
    expected = FUNCTIONS[name](x.astype(np.float64))
    # 1 + erf and 1 + tanh lose digits where they are almost 0: the error is relative to x there.
    tolerance = 1e-6 * np.abs(expected) + (2e-7 * np.abs(x) if "gelu" in name else 0)
    assert (np.abs(_native.row_activate(isa, name, x) - expected) <= tolerance).all()


@pytest.mark.parametrize("name", FUNCTIONS)
def test_activation_functions_at_the_ends(isa: str, name: str) -> None:
    x = np.array([[np.nan, np.inf, 1e30, -1e30, 90.0, -90.0, 0.0]], np.float32)
    out = _native.row_activate(isa, name, x)[0]
    assert np.isnan(out[0]) and out[1] == np.inf and out[2] == np.float32(1e30) and out[4] == 90
    assert out[3] == 0 and abs(out[5]) < 1e-35 and out[6] == 0
    minus_infinity = _native.row_activate(isa, name, np.full((1, 1), -np.inf, np.float32))[0, 0]
    assert minus_infinity == 0 if name == "relu" else np.isnan(minus_infinity)  # -inf * 0, as in the oracle


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("width", WIDTHS)
def test_gate_multiplies_the_activation(isa: str, name: str, width: int) -> None:
    gate, up = _rows(1, 2, width), _rows(2, 2, width)
    _same_bits(_native.row_gate(isa, name, gate, up), _native.row_activate(isa, name, gate) * up)


@pytest.mark.parametrize("width", WIDTHS)
def test_sums_and_products_round_like_numpy(isa: str, width: int) -> None:
    x, y = _rows(1, 2, width), _rows(2, 2, width)
    _same_bits(_native.row_add(isa, x, y), x + y)
    _same_bits(_native.row_scale(isa, x, 1.7), x * np.float32(1.7))


def test_softcap_agrees_with_float64(isa: str) -> None:
    x = np.concatenate([np.linspace(-300, 300, 3001), np.geomspace(1e-20, 1, 50)]).astype(np.float32)[None]
    expected = 30 * np.tanh(x.astype(np.float64) / 30)
    np.testing.assert_allclose(_native.row_softcap(isa, x, 30.0), expected, rtol=1e-6)
    ends = _native.row_softcap(isa, np.array([[np.nan, np.inf, -np.inf]], np.float32), 30.0)[0]
    assert np.isnan(ends[0]) and ends[1] == 30 and ends[2] == -30


@pytest.mark.parametrize(("head_dim", "half"), [(64, 32), (80, 40), (128, 16), (6, 3), (64, 0), (96, 24)])
def test_pairs_rotate_like_the_oracle(isa: str, head_dim: int, half: int) -> None:
    heads, angles = _rows(1, 3, head_dim), _rows(2, 1, max(half, 1))[0][:half]
    cos, sin = np.cos(angles), np.sin(angles)
    left, right, rest = heads[:, :half], heads[:, half : 2 * half], heads[:, 2 * half :]
    expected = np.concatenate((left * cos - right * sin, right * cos + left * sin, rest), axis=1)
    _same_bits(_native.row_rotate_pairs(isa, heads, cos, sin), expected)


def test_the_place_in_a_vector_does_not_matter(isa: str) -> None:
    """Element-wise functions give the same bits in the middle of a row and in its masked end."""
    x = _rows(5, 1, 64)
    for name, width in itertools.product(FUNCTIONS, range(1, 33)):
        whole = _native.row_activate(isa, name, x)[:, :width]
        _same_bits(_native.row_activate(isa, name, np.ascontiguousarray(x[:, :width])), np.ascontiguousarray(whole))


# ---- argmax ----


@pytest.mark.parametrize("count", [1, 15, 16, 17, 64, 1000, 49152])
def test_argmax_is_the_lowest_index_of_the_largest_value(isa: str, count: int) -> None:
    rng = np.random.default_rng(count)
    for _ in range(10):
        x = rng.integers(-5, 5, count).astype(np.float32)  # many equal values
        assert _native.row_argmax(isa, x) == int(x.argmax())
    for index in {0, count // 2, count - 1}:
        x = np.full(count, -np.inf, np.float32)
        x[index] = -3e38
        assert _native.row_argmax(isa, x) == index


@pytest.mark.parametrize("count", [1, 17, 64, 100])
def test_argmax_reports_what_is_not_finite(isa: str, count: int) -> None:
    assert _native.row_argmax(isa, np.full(count, -np.inf, np.float32)) == -1
    for poison, index in itertools.product((np.nan, np.inf), (0, count // 2, count - 1)):
        x = np.arange(count, dtype=np.float32)
        x[index] = poison
        assert _native.row_argmax(isa, x) == -1


# ---- embedding rows ----


@pytest.mark.parametrize(
    ("code", "activation", "scale", "group", "minimum", "rotated"),
    [
        ("int8", "int8", "bfloat16", 64, False, True),
        ("int8", "int8", "bfloat16", 64, False, False),
        ("int8", "int8", "float16", 32, False, False),
        ("int8", "int8", "float32", 16, False, False),
        ("int8", "int8", "float16", 32, True, False),
        ("int8", "bfloat16", "bfloat16", 64, False, False),
        ("int8", "bfloat16", "bfloat16", 64, False, True),
        ("int4", "int8", "float16", 32, False, False),
        ("int4", "int8", "float32", 32, True, False),
    ],
)
@pytest.mark.parametrize(("channels", "columns"), [(32, 128), (45, 100), (70, 576)])
def test_rows_of_grouped_weights_are_unpacked(
    isa: str,
    code: str,
    activation: str,
    scale: str,
    group: int,
    minimum: bool,
    rotated: bool,
    channels: int,
    columns: int,
) -> None:
    weight = grouped_example(
        np.random.default_rng(columns),
        code=code,
        activation=activation,
        scale=scale,
        group=group,
        minimum=minimum,
        rotated=rotated,
        channels=channels,
        columns=columns,
    )
    _same_bits(_native.row_unpack(isa, weight.packed), np.ascontiguousarray(weight.values))


@pytest.mark.parametrize("code", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize(("channels", "columns"), [(32, 64), (45, 33), (70, 577)])
def test_rows_of_plain_weights_are_unpacked(isa: str, code: str, channels: int, columns: int) -> None:
    weight = plain_weight(_rows(columns, channels, columns), code)
    _same_bits(_native.row_unpack(isa, weight.packed), np.ascontiguousarray(weight.values))


def test_float16_is_widened_exactly(isa: str) -> None:
    """Every finite float16, subnormal ones too."""
    patterns = np.arange(1 << 16, dtype=np.uint16).reshape(1024, 64)
    values = patterns.view(np.float16).astype(np.float32)
    values[~np.isfinite(values)] = 0
    weight = plain_weight(values, "float16")
    _same_bits(_native.row_unpack(isa, weight.packed), values)


# ---- bounds ----


def test_arrays_that_do_not_fit_are_refused(isa: str) -> None:
    x, short = np.ones((2, 8), np.float32), np.ones(7, np.float32)
    with pytest.raises(ValueError, match="weight has 7 elements; it must have 8"):
        _native.row_rms_norm(isa, x, short, None, 1e-5)
    with pytest.raises(ValueError, match="same shape"):
        _native.row_add(isa, x, np.ones((2, 9), np.float32))
    with pytest.raises(ValueError, match="allowed: silu"):
        _native.row_activate(isa, "swish", x)
    with pytest.raises(ValueError, match="half a head"):
        _native.row_rotate_pairs(isa, x, short, short)
    for group, dot_group in ((48, 48), (64, 128), (8, 8), (512, 512), (-64, -64), (0, 0)):
        with pytest.raises(ValueError, match="allowed: powers of two"):
            _native.row_prepare(isa, x, "int8", group, dot_group, False, 64)
    with pytest.raises(ValueError, match="columns; allowed"):
        _native.row_prepare(isa, x, "int8", 64, 64, False, 63)
    with pytest.raises(ValueError, match="columns; allowed"):
        _native.row_prepare(isa, np.ones((1, 65), np.float32), "int8", 64, 64, False, 64)
