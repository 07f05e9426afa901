"""The orthonormal Walsh-Hadamard transform that spreads outliers over their group.

Every back end must round as this module does, so the order of operations is part of the contract.  On a run
x[0], ..., x[n-1] of float32 (n a power of two):

    for stride in 1, 2, 4, ..., n / 2:
        for every i whose bit `stride` is clear, with j = i + stride:
            x[i], x[j] = x[i] + x[j], x[i] - x[j]        each rounded to float32
    x[i] = x[i] * float32(1 / sqrt(n))                   1 / 8 for n = 64: exact

Rows and columns come in natural (Hadamard) order: the matrix is (-1) ** popcount(i & j) / sqrt(n), symmetric and its
own inverse.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from topg.errors import PrecisionError

ROTATION_GROUP = 64
_RUNS_AT_A_TIME = 1024  # 64 x 1024 float32 and their double fit a core's second-level cache


def hadamard(values: NDArray[np.float32], group: int = ROTATION_GROUP) -> NDArray[np.float32]:
    """Transform each run of `group` values of the last axis; returns a new float32 array of the same shape.

    Raises PrecisionError unless `group` is a power of two that divides the last axis.
    """
    if group < 1 or group & (group - 1):
        raise PrecisionError(f"a rotation over {group} columns was asked for; it must be a power of two")
    columns = values.shape[-1] if values.ndim else 0
    if values.ndim == 0 or columns % group:
        raise PrecisionError(f"{columns} columns cannot be rotated in runs of {group}: fill them up with zeros first")
    runs = np.asarray(values, np.float32).reshape(-1, group)
    rotated = np.empty(runs.shape, np.float32)
    for start in range(0, len(runs), _RUNS_AT_A_TIME):
        stop = start + _RUNS_AT_A_TIME
        rotated[start:stop] = rotate_lanes(runs[start:stop].T.copy()).T
    return rotated.reshape(values.shape)


def rotate_lanes(lanes: NDArray[np.float32]) -> NDArray[np.float32]:
    """Transform along the first axis: lanes [n, runs], C-contiguous, one run a column.

    Runs lie side by side so that every butterfly is one pass over contiguous memory.  Overwrites `lanes`; the result
    is either `lanes` or another array.
    """
    source, target = lanes, np.empty_like(lanes)
    length, runs = lanes.shape
    stride = 1
    while stride < length:
        pairs = (length // (2 * stride), 2, stride, runs)
        left, right = source.reshape(pairs)[:, 0], source.reshape(pairs)[:, 1]
        np.add(left, right, out=target.reshape(pairs)[:, 0])
        np.subtract(left, right, out=target.reshape(pairs)[:, 1])
        source, target = target, source
        stride *= 2
    source *= np.float32(1 / math.sqrt(length))
    return source
