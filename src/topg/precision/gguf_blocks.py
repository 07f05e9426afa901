"""GGUF tensors taken over bit for bit: the blocks of ggml's formats, laid out as our parts.

A ggml row is a run of blocks, each with its scales beside its codes; ours keeps codes, scales and minimums apart.  The
numbers are the same: `dequantise(keep(raw, ...), ...)` gives the float32 values ggml's own reference gives, every bit.
Layouts: `ggml-common.h` and `ggml-quants.c` of the ggml project.  Everything is little-endian.

    name   columns  bytes of a block, in order                                          value
    Q8_0        32  d f16, codes i8[32]                                                 d q
    Q4_0        32  d f16, nibbles[16]                                                  d (q - 8)
    Q4_1        32  d f16, m f16, nibbles[16]                                           d q + m
    Q5_0        32  d f16, fifth bits u32, nibbles[16]                                  d (q - 16)
    Q5_1        32  d f16, m f16, fifth bits u32, nibbles[16]                           d q + m
    Q4_K       256  d f16, dmin f16, six-bit scales[12], nibbles[128]                   (d s) q - (dmin m)   per 32
    Q5_K       256  d f16, dmin f16, six-bit scales[12], fifth bits[32], nibbles[128]   (d s) q - (dmin m)   per 32
    Q6_K       256  low nibbles[128], upper two bits[64], scales i8[16], d f16          (d s) (q - 32)       per 16

The products d s and dmin m are exact in float32, so they are stored as that.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from topg.errors import CheckpointError, UnsupportedModelError
from topg.precision.formats import BFLOAT16, FLOAT16, FLOAT32, Precision, ScaleFormat, WeightFormat
from topg.precision.storage import Parts, allocate, decode, numpy_dtype, pack_nibbles, plain_storage, row_blocks

Bytes = NDArray[np.uint8]


@dataclass(frozen=True)
class _Unpacked:
    """n blocks: codes [n, block columns] (int4: nibbles 0..15), scales and minimums [n, groups of a block]."""

    codes: NDArray[Any]
    scales: NDArray[Any]
    minimums: NDArray[Any] | None = None


@dataclass(frozen=True)
class _BlockFormat:
    columns: int
    nbytes: int
    precision: Precision
    unpack: Callable[[Bytes], _Unpacked]


def kept_precision(ggml_type_name: str) -> Precision | None:
    """How a tensor of this ggml type is stored when it is kept, or None when ToPG cannot keep the type.

    Integer types are multiplied with activations rounded to int8 in groups of 32 columns.
    """
    if ggml_type_name in _PLAIN:
        return _PLAIN[ggml_type_name]
    if ggml_type_name in _BLOCKS:
        return _BLOCKS[ggml_type_name].precision
    return None


def keep(raw: Bytes, ggml_type_name: str, columns: int) -> Parts:
    """The parts of `kept_precision(ggml_type_name)` for rows of a GGUF tensor: raw uint8 [rows, bytes of a row].

    Rows are independent: a block of rows gives the same bits as the whole.  Raises UnsupportedModelError for a type
    that cannot be kept, CheckpointError when the row size does not fit `columns` or a value or scale is not finite.
    """
    precision = kept_precision(ggml_type_name)
    if precision is None:
        raise UnsupportedModelError(
            f"GGUF tensor type {ggml_type_name} cannot be kept; types that can: {', '.join([*_PLAIN, *_BLOCKS])}"
        )
    _check_row_bytes(raw, ggml_type_name, columns)
    parts = allocate(precision, (len(raw), columns))
    for rows in row_blocks(len(raw), columns):
        target = {name: part[rows] for name, part in parts.items()}
        if ggml_type_name in _PLAIN:
            target["values"][...] = np.ascontiguousarray(raw[rows]).view(target["values"].dtype)
        else:
            _keep_blocks(raw[rows], _BLOCKS[ggml_type_name], target)
        _check_finite(target, precision, ggml_type_name, rows.start)
    return parts


def _keep_blocks(raw: Bytes, block_format: _BlockFormat, out: Parts) -> None:
    unpacked = block_format.unpack(np.ascontiguousarray(raw).reshape(-1, block_format.nbytes))
    codes = unpacked.codes
    if block_format.precision.weights == "int4":
        codes = pack_nibbles(codes)
    out["codes"][...] = codes.reshape(out["codes"].shape)
    out["scales"][...] = unpacked.scales.reshape(out["scales"].shape)
    if unpacked.minimums is not None:
        out["minimums"][...] = unpacked.minimums.reshape(out["minimums"].shape)


def _check_row_bytes(raw: Bytes, ggml_type_name: str, columns: int) -> None:
    if raw.ndim != 2 or raw.dtype != np.uint8:
        raise CheckpointError(
            f"rows of a {ggml_type_name} tensor must be uint8 [rows, bytes]; given: {raw.dtype} {list(raw.shape)}"
        )
    block_columns, block_bytes = _block_size(ggml_type_name)
    if columns < 1 or columns % block_columns:
        raise CheckpointError(f"a {ggml_type_name} row has {columns} columns; it must be a multiple of {block_columns}")
    expected = columns // block_columns * block_bytes
    if raw.shape[1] != expected:
        raise CheckpointError(
            f"a {ggml_type_name} row of {columns} columns has {raw.shape[1]} bytes; it must have {expected}"
        )


def _block_size(ggml_type_name: str) -> tuple[int, int]:
    if ggml_type_name in _PLAIN:
        return 1, numpy_dtype(plain_storage(_PLAIN[ggml_type_name])).itemsize
    return _BLOCKS[ggml_type_name].columns, _BLOCKS[ggml_type_name].nbytes


def _check_finite(parts: Parts, precision: Precision, ggml_type_name: str, first_row: int) -> None:
    storage = precision.scale or plain_storage(precision)
    for name in ("values", "scales", "minimums"):
        if name not in parts:
            continue
        finite = np.isfinite(decode(parts[name], storage))
        if not finite.all():
            row, column = np.argwhere(~finite)[0]
            raise CheckpointError(
                f"{name}[{first_row + row}, {column}] of a {ggml_type_name} tensor is not a finite number: "
                "the file is damaged, get it again"
            )


def _halves(blocks: Bytes, start: int) -> NDArray[np.float16]:
    """The float16 at byte `start` of each block, [n, 1]."""
    return np.ascontiguousarray(blocks[:, start : start + 2]).view("<f2")


def _nibbles(packed: Bytes, run: int) -> Bytes:
    """Each run of bytes holds its own length of columns in the low nibbles, then as many in the high ones."""
    runs = packed.reshape(len(packed), -1, 1, run)
    shifts = np.array([0, 4], np.uint8).reshape(2, 1)
    return ((runs >> shifts) & np.uint8(15)).reshape(len(packed), -1)


def _fifth_bits(blocks: Bytes, start: int) -> Bytes:
    """16 for each column whose bit is set in the 32 bits at byte `start`, lowest bit first; else 0."""
    return np.unpackbits(blocks[:, start : start + 4], axis=1, bitorder="little") << np.uint8(4)


def _unpack_q8_0(blocks: Bytes) -> _Unpacked:
    return _Unpacked(blocks[:, 2:].view(np.int8), _halves(blocks, 0))


def _unpack_q4_0(blocks: Bytes) -> _Unpacked:
    return _Unpacked(_nibbles(blocks[:, 2:], 16), _halves(blocks, 0))


def _unpack_q4_1(blocks: Bytes) -> _Unpacked:
    return _Unpacked(_nibbles(blocks[:, 4:], 16), _halves(blocks, 0), _halves(blocks, 2))


def _unpack_q5_0(blocks: Bytes) -> _Unpacked:
    codes = _nibbles(blocks[:, 6:], 16) | _fifth_bits(blocks, 2)
    return _Unpacked(codes.view(np.int8) - np.int8(16), _halves(blocks, 0))


def _unpack_q5_1(blocks: Bytes) -> _Unpacked:
    codes = _nibbles(blocks[:, 8:], 16) | _fifth_bits(blocks, 4)
    return _Unpacked(codes, _halves(blocks, 0), _halves(blocks, 2))


def _unpack_q4_k(blocks: Bytes) -> _Unpacked:
    return _Unpacked(_nibbles(blocks[:, 16:], 32), *_k_scales(blocks))


def _unpack_q5_k(blocks: Bytes) -> _Unpacked:
    # Bit j of byte i is the fifth bit of column 32 j + i.
    fifth = np.unpackbits(blocks[:, 16:48, None], axis=2, bitorder="little")
    codes = _nibbles(blocks[:, 48:], 32) | fifth.transpose(0, 2, 1).reshape(len(blocks), 256) << np.uint8(4)
    return _Unpacked(codes, *_k_scales(blocks))


def _unpack_q6_k(blocks: Bytes) -> _Unpacked:
    # Each 128 columns have 64 bytes of nibbles (low ones first) and 32 bytes of upper bits: columns i, 32 + i, 64 + i
    # and 96 + i have theirs in byte i, lowest first.
    shifts = np.array([0, 2, 4, 6], np.uint8).reshape(4, 1)
    upper = (blocks[:, 128:192].reshape(-1, 2, 1, 32) >> shifts) & np.uint8(3)
    codes = _nibbles(blocks[:, :128], 64) | upper.reshape(len(blocks), 256) << np.uint8(4)
    scales = blocks[:, 192:208].view(np.int8).astype(np.float32)
    return _Unpacked(codes.view(np.int8) - np.int8(32), _halves(blocks, 208).astype(np.float32) * scales)


def _k_scales(blocks: Bytes) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Scales and minimums [n, 8] of Q4_K and Q5_K blocks, from two float16 and twelve bytes of six-bit factors.

    Bytes 0..3 and 4..7 hold the factors of groups 0..3, scale and minimum, in their low six bits; bytes 8..11 the low
    four bits of those of groups 4..7 (scale low, minimum high), whose upper two are the upper two of bytes 0..7.
    """
    first, second, third = (blocks[:, start : start + 4] for start in (4, 8, 12))
    scale_factors = np.hstack([first & 63, (third & 15) | (first >> 6) << 4])
    minimum_factors = np.hstack([second & 63, (third >> 4) | (second >> 6) << 4])
    scales = _halves(blocks, 0).astype(np.float32) * scale_factors
    minimums = _halves(blocks, 2).astype(np.float32) * minimum_factors
    return scales, -minimums


def _precision(weights: WeightFormat, *, group: int, scale: ScaleFormat, minimum: bool = False) -> Precision:
    return Precision(weights, "int8", group_size=group, activation_group=32, minimum=minimum, scale=scale)


_PLAIN: Mapping[str, Precision] = {"F32": FLOAT32, "F16": FLOAT16, "BF16": BFLOAT16}
_BLOCKS: Mapping[str, _BlockFormat] = {
    "Q8_0": _BlockFormat(32, 34, _precision("int8", group=32, scale="float16"), _unpack_q8_0),
    "Q4_0": _BlockFormat(32, 18, _precision("int4", group=32, scale="float16"), _unpack_q4_0),
    "Q4_1": _BlockFormat(32, 20, _precision("int4", group=32, scale="float16", minimum=True), _unpack_q4_1),
    "Q5_0": _BlockFormat(32, 22, _precision("int8", group=32, scale="float16"), _unpack_q5_0),
    "Q5_1": _BlockFormat(32, 24, _precision("int8", group=32, scale="float16", minimum=True), _unpack_q5_1),
    "Q4_K": _BlockFormat(256, 144, _precision("int4", group=32, scale="float32", minimum=True), _unpack_q4_k),
    "Q5_K": _BlockFormat(256, 176, _precision("int8", group=32, scale="float32", minimum=True), _unpack_q5_k),
    "Q6_K": _BlockFormat(256, 210, _precision("int8", group=16, scale="float32"), _unpack_q6_k),
}
