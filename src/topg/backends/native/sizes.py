"""Sizes of packed weights, as native/kernels/layout.h lays them out."""

from __future__ import annotations

from topg.precision.formats import BYTES, Precision

BLOCK_CHANNELS = 32


def packed_bytes(precision: Precision, shape: tuple[int, ...]) -> int:
    """Memory of a packed weight [rows, columns], or of a vector [columns]."""
    if len(shape) == 1:
        return _rounded(shape[0]) * BYTES["float32"]
    rows, columns = _rounded(shape[0]), shape[1]
    if not precision.grouped:
        columns += columns % 2 if precision.weights == "bfloat16" else 0
    return precision.nbytes((rows, columns))


def _rounded(channels: int) -> int:
    return -(-channels // BLOCK_CHANNELS) * BLOCK_CHANNELS
