"""Packed weights written by the description in layout.h, one element at a time: independent of the packing code."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from topg import _native
from topg.precision.bfloat16 import from_bfloat16, to_bfloat16
from topg.precision.rotation import hadamard

BLOCK = 32


@dataclass(frozen=True)
class Example:
    """A random weight: its packed form and the float32 values that the form stands for."""

    packed: _native.PackedBytes
    values: NDArray[np.float32]


def _scale_bytes(values: NDArray[np.float32], scale: str) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
    """What is stored, and what that means."""
    if scale == "bfloat16":
        patterns = to_bfloat16(values)
        return patterns.view(np.uint8), from_bfloat16(patterns)
    stored = values.astype(scale)
    return stored.view(np.uint8), stored.astype(np.float32)


def _packed_codes(codes: NDArray[np.int32], code: str, activation: str, minimum: bool) -> NDArray[np.uint8]:
    """One group [32 channels, columns] as its bytes."""
    group = codes.shape[1]
    if code == "int8" and activation == "bfloat16":
        return codes.T.astype(np.int8).copy().view(np.uint8).reshape(-1)
    if code == "int8":
        lanes = (codes + 128).astype(np.uint8).reshape(2, 16, group // 4, 4)
        return lanes.transpose(2, 0, 1, 3).reshape(-1)
    nibbles = (codes + (0 if minimum else 8)).astype(np.uint8).reshape(2, 16, group // 8, 2, 4)
    pairs = nibbles[:, :, :, 0] | nibbles[:, :, :, 1] << 4
    return np.ascontiguousarray(pairs.transpose(2, 0, 1, 3)).reshape(-1)


def grouped_example(
    rng: np.random.Generator,
    *,
    code: str,
    activation: str,
    scale: str,
    group: int,
    minimum: bool,
    rotated: bool,
    channels: int,
    columns: int,
) -> Example:
    """A weight stored as codes with scales."""
    blocks, groups = -(-channels // BLOCK), -(-columns // group)
    low, high = (-128, 128) if code == "int8" else (0, 16) if minimum else (-8, 8)
    codes = rng.integers(low, high, (blocks * BLOCK, groups, group)).astype(np.int32)
    pieces: list[NDArray[np.uint8]] = []
    values = np.empty(codes.shape, np.float32)
    for block in range(blocks):
        rows = slice(block * BLOCK, (block + 1) * BLOCK)
        for index in range(groups):
            pieces.append(_packed_codes(codes[rows, index], code, activation, minimum))
            stored, scales = _scale_bytes(rng.uniform(0.001, 1, BLOCK).astype(np.float32), scale)
            pieces.append(stored)
            values[rows, index] = codes[rows, index].astype(np.float32) * scales[:, None]
            if minimum:
                stored, minimums = _scale_bytes(rng.normal(size=BLOCK).astype(np.float32), scale)
                pieces.append(stored)
                values[rows, index] += minimums[:, None]
    flat = values.reshape(blocks * BLOCK, groups * group)
    flat = hadamard(flat) if rotated else flat
    packed = _native.PackedBytes(
        np.concatenate(pieces), code, activation, scale, group, minimum, channels, columns, rotated
    )
    return Example(packed, flat[:channels, :columns])


def plain_weight(values: NDArray[np.float32], code: str) -> Example:
    """A weight stored as numbers; `values` in the example are as stored."""
    channels, columns = values.shape
    blocks = -(-channels // BLOCK)
    padded = np.zeros((blocks * BLOCK, columns + (columns % 2 if code == "bfloat16" else 0)), np.float32)
    padded[:channels, :columns] = values
    if code == "bfloat16":
        patterns = to_bfloat16(padded)
        stored = from_bfloat16(patterns)
        lanes = patterns.reshape(blocks, 2, 16, -1, 2).transpose(0, 3, 1, 2, 4)
    else:
        numbers = padded.astype(code)
        stored = numbers.astype(np.float32)
        lanes = numbers.reshape(blocks, BLOCK, columns).transpose(0, 2, 1)
    raw = np.ascontiguousarray(lanes).reshape(-1).view(np.uint8)
    activation = "bfloat16" if code == "bfloat16" else "float32"
    packed = _native.PackedBytes(raw, code, activation, "none", 0, False, channels, columns, False)
    return Example(packed, stored[:channels, :columns])
