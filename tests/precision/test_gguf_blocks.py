from __future__ import annotations

import gguf
import numpy as np
import pytest

from topg.errors import CheckpointError, UnsupportedModelError
from topg.precision.formats import BFLOAT16, FLOAT16, FLOAT32
from topg.precision.gguf_blocks import keep, kept_precision
from topg.precision.quantise import dequantise

# Where a block holds float16 numbers; random bytes there are replaced by finite ones.
HALF_OFFSETS = {
    "Q8_0": (0,), "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2),
    "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,),
}  # fmt: skip
PLAIN = {"F32": FLOAT32, "F16": FLOAT16, "BF16": BFLOAT16}
KEPT = [*PLAIN, *HALF_OFFSETS]


def random_rows(name: str, rows: int, blocks: int, seed: int = 0) -> np.ndarray:
    """Random bytes with finite scales: uint8 [rows, bytes of a row]."""
    rng = np.random.default_rng(seed)
    nbytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name]][1]
    raw = rng.integers(0, 256, (rows, blocks, nbytes), dtype=np.uint8)
    for offset in HALF_OFFSETS.get(name, ()):
        halves = rng.integers(0, 0x7C00, (rows, blocks, 1), dtype=np.uint16)  # finite, subnormal ones among them
        halves |= rng.integers(0, 2, halves.shape, dtype=np.uint16) << np.uint16(15)
        raw[:, :, offset : offset + 2] = halves.view(np.uint8)
    return raw.reshape(rows, -1)


def plain_rows(name: str, rows: int, columns: int) -> np.ndarray:
    values = np.random.default_rng(0).standard_normal((rows, columns)).astype(np.float32)
    if name == "BF16":
        return gguf.quants.quantize(values, gguf.GGMLQuantizationType.BF16).view(np.uint8)
    return values.astype(np.float16 if name == "F16" else np.float32).view(np.uint8)


def rows_of(name: str, rows: int, blocks: int) -> tuple[np.ndarray, int]:
    if name in PLAIN:
        return plain_rows(name, rows, 256 * blocks), 256 * blocks
    columns = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name]][0]
    return random_rows(name, rows, blocks), columns * blocks


@pytest.mark.parametrize("name", KEPT)
def test_values_are_those_of_the_reference_bit_for_bit(name: str) -> None:
    raw, columns = rows_of(name, rows=300, blocks=7)
    precision = kept_precision(name)
    assert precision is not None
    restored = dequantise(keep(raw, name, columns), precision, (300, columns))
    expected = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[name])
    assert np.array_equal(restored.view(np.uint32), expected.view(np.uint32))


@pytest.mark.parametrize("name", KEPT)
def test_blocks_of_rows_give_the_bits_of_the_whole(name: str) -> None:
    raw, columns = rows_of(name, rows=5, blocks=3)
    whole, part = keep(raw, name, columns), keep(raw[2:4], name, columns)
    assert all(whole[key][2:4].tobytes() == part[key].tobytes() for key in whole)


@pytest.mark.parametrize("name", HALF_OFFSETS)
def test_kept_integers_are_multiplied_with_int8_activations_of_whole_groups(name: str) -> None:
    precision = kept_precision(name)
    assert precision is not None
    assert precision.group_size is not None
    assert (precision.activations, precision.activation_group, precision.rotated) == ("int8", 32, False)
    assert precision.activation_group % precision.group_size == 0


@pytest.mark.parametrize("name", ["Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
def test_float16_scales_stay_float16(name: str) -> None:
    raw, columns = rows_of(name, rows=2, blocks=2)
    halves = raw.reshape(2, 2, -1)[:, :, :2].copy().view(np.float16)[..., 0]
    assert np.array_equal(keep(raw, name, columns)["scales"], halves)


@pytest.mark.parametrize(("name", "precision"), PLAIN.items())
def test_plain_types_are_stored_as_they_are(name: str, precision: object) -> None:
    raw, columns = rows_of(name, rows=2, blocks=1)
    assert kept_precision(name) == precision
    assert keep(raw, name, columns)["values"].tobytes() == raw.tobytes()


@pytest.mark.parametrize("name", ["Q2_K", "Q3_K", "IQ4_NL", "MXFP4", "q8_0", ""])
def test_other_types_are_refused_by_name(name: str) -> None:
    assert kept_precision(name) is None
    with pytest.raises(UnsupportedModelError, match=f"type {name} cannot be kept; types that can: F32"):
        keep(np.zeros((1, 34), np.uint8), name, 32)


@pytest.mark.parametrize(
    ("name", "nbytes", "columns", "message"),
    [
        ("Q8_0", 34, 48, "48 columns; it must be a multiple of 32"),
        ("Q8_0", 34, 64, "has 34 bytes; it must have 68"),
        ("Q4_K", 144, 32, "multiple of 256"),
        ("F16", 6, 4, "has 6 bytes; it must have 8"),
        ("F16", 0, 0, "0 columns"),
    ],
)
def test_rows_of_the_wrong_size(name: str, nbytes: int, columns: int, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        keep(np.zeros((2, nbytes), np.uint8), name, columns)


def test_rows_must_be_bytes() -> None:
    with pytest.raises(CheckpointError, match="uint8"):
        keep(np.zeros((1, 34), np.int8), "Q8_0", 32)


@pytest.mark.parametrize("name", HALF_OFFSETS)
def test_scales_that_are_not_finite_are_refused(name: str) -> None:
    raw, columns = rows_of(name, rows=3, blocks=2)
    offset = HALF_OFFSETS[name][-1]
    raw[2, offset : offset + 2] = np.array([0x7C00], np.uint16).view(np.uint8)
    with pytest.raises(CheckpointError, match=rf"\[2, \d+\] of a {name} tensor is not a finite number"):
        keep(raw, name, columns)


def test_values_that_are_not_finite_are_refused() -> None:
    raw = np.array([[1, np.nan]], np.float32).view(np.uint8)
    with pytest.raises(CheckpointError, match=r"values\[0, 1\] of a F32"):
        keep(raw, "F32", 2)
