"""bfloat16 as bit patterns: numpy has no such type, so its values travel as uint16.

A bfloat16 is the upper half of a float32: the sign, all eight exponent bits and seven mantissa bits.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_BLOCK = 1 << 16  # values converted at a time, so that the intermediate stays in the cache
_QUIET_BIT = np.uint16(0x0040)


def to_bfloat16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Round float32 to the nearest bfloat16, ties to even; returns bit patterns of the same shape.

    Infinities stay, values beyond the largest bfloat16 become infinite, a NaN stays a (quiet) NaN of its sign.
    """
    source = np.ascontiguousarray(values, dtype=np.float32).reshape(-1)
    patterns = np.empty(source.size, np.uint16)
    for start in range(0, source.size, _BLOCK):
        _round_block(source[start : start + _BLOCK], patterns[start : start + _BLOCK])
    return patterns.reshape(np.shape(values))


def from_bfloat16(patterns: NDArray[np.uint16]) -> NDArray[np.float32]:
    """The float32 values, exact, that bfloat16 bit patterns stand for."""
    bits = np.asarray(patterns, dtype=np.uint16).astype(np.uint32)
    bits <<= np.uint32(16)
    return bits.view(np.float32)


def _round_block(values: NDArray[np.float32], out: NDArray[np.uint16]) -> None:
    bits = values.view(np.uint32)
    # Half of the last kept place, less one where that place is even, carries into it exactly when rounding up is due.
    rounded = bits >> np.uint32(16)
    rounded &= np.uint32(1)
    rounded += np.uint32(0x7FFF)
    rounded += bits
    rounded >>= np.uint32(16)
    out[...] = rounded
    nan = np.isnan(values)
    if nan.any():  # the carry above may have turned a NaN into an infinity or a zero
        out[nan] = (bits[nan] >> np.uint32(16)).astype(np.uint16) | _QUIET_BIT
