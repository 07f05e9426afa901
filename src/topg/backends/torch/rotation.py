"""The orthonormal Walsh-Hadamard transform of each group of columns.  It is its own inverse."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from topg.precision.rotation import ROTATION_GROUP


def rotate(x: Tensor, group: int = ROTATION_GROUP) -> Tensor:
    """Transform x [rows, columns], columns a multiple of `group`, a power of two.

    Rounds exactly as `topg.precision.rotation` does.
    """
    values = x.reshape(-1, group)
    distance = 1
    while distance < group:
        pairs = values.view(-1, group // (2 * distance), 2, distance)
        first, second = pairs[:, :, 0], pairs[:, :, 1]
        values = torch.stack((first + second, first - second), dim=2).view(-1, group)
        distance *= 2
    return values.mul(1 / math.sqrt(group)).view(x.shape)
