"""The orthonormal 64-point Walsh-Hadamard transform of each group of 64 columns.  It is its own inverse."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from topg.precision.rotation import ROTATION_GROUP


def rotate(x: Tensor) -> Tensor:
    """Transform x [rows, columns], columns a multiple of 64.

    Rounds exactly as `topg.precision.rotation` does.
    """
    values = x.reshape(-1, ROTATION_GROUP)
    distance = 1
    while distance < ROTATION_GROUP:
        pairs = values.view(-1, ROTATION_GROUP // (2 * distance), 2, distance)
        first, second = pairs[:, :, 0], pairs[:, :, 1]
        values = torch.stack((first + second, first - second), dim=2).view(-1, ROTATION_GROUP)
        distance *= 2
    return values.mul(1 / math.sqrt(ROTATION_GROUP)).view(x.shape)
