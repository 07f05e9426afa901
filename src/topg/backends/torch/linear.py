"""Matrix products with every kind of weight: x [rows, columns] @ weight.T -> [rows, outputs], float32."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from topg.backends.torch.rotation import rotate
from topg.backends.torch.weights import GroupedWeight, Weight
from topg.precision.rotation import ROTATION_GROUP

# A library picks its kernel, and with it the order of additions, by the shape of a product.  So every float product
# has TILE_ROWS rows and at most TILE_COLUMNS terms per sum: with more terms some libraries cut sums among threads.
TILE_ROWS = 16
TILE_COLUMNS = 256

OUTPUTS_AT_A_TIME = 1024  # widened weights of one block stay in a core's second-level cache
ROWS_AT_A_TIME = 64  # bounds the memory of the sums of all groups


def linear(x: Tensor, weight: Weight) -> Tensor:
    """x @ weight.T in the arithmetic of the weight's precision."""
    if isinstance(weight, GroupedWeight):
        x = _padded(x, _columns_to_fill(weight))
        x = rotate(x) if weight.precision.rotated else x
        if weight.precision.activations == "int8":
            return _quantised_linear(x, weight)
        x = x[:, : weight.padded_columns]
    if weight.precision.activations == "bfloat16":
        x = x.bfloat16().float()
    return _float_linear(x, weight)


def quantise_rows(x: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """Symmetric int8 per (row, group of columns): codes like x, as whole float32 numbers, and scales [rows, groups].

    scale = largest magnitude / 127; code = x / scale rounded half to even.  A group of zeros has scale and codes 0.
    """
    groups = x.reshape(x.shape[0], x.shape[1] // group, group)
    scales = groups.abs().amax(dim=2, keepdim=True) / 127
    codes = torch.round(groups / scales).clamp(-127, 127)
    codes = torch.where(scales == 0, torch.zeros_like(codes), codes)
    return codes.view(x.shape), scales.squeeze(2)


def tile_rows(x: Tensor) -> Tensor:
    """x [rows, columns] as [tiles, TILE_ROWS, columns], the last tile filled up with zeros."""
    tiles = -(-x.shape[0] // TILE_ROWS)
    filled = torch.nn.functional.pad(x, (0, 0, 0, tiles * TILE_ROWS - x.shape[0]))
    return filled.view(tiles, TILE_ROWS, x.shape[1])


def _float_linear(x: Tensor, weight: Weight) -> Tensor:
    tiles = tile_rows(x)
    out = x.new_empty(tiles.shape[0], TILE_ROWS, weight.rows)
    for block in _blocks(weight.rows, OUTPUTS_AT_A_TIME):
        values = weight.dequantised(block)
        for tile, target in zip(tiles, out, strict=True):
            target[:, block] = _tile_product(tile, values)
    return out.flatten(0, 1)[: x.shape[0]]


def _tile_product(tile: Tensor, values: Tensor) -> Tensor:
    """tile [TILE_ROWS, columns] @ values [outputs, columns].T, runs of TILE_COLUMNS added in order."""
    runs = list(_blocks(tile.shape[1], TILE_COLUMNS))
    total = torch.mm(tile[:, runs[0]], values[:, runs[0]].t())
    for run in runs[1:]:
        total = total + torch.mm(tile[:, run], values[:, run].t())
    return total


def _quantised_linear(x: Tensor, weight: GroupedWeight) -> Tensor:
    """Exact sums within a group, then the groups in order: acc += dot * (x scale * weight scale) in float32."""
    assert weight.precision.activation_group is not None
    codes, scales = quantise_rows(x, weight.precision.activation_group)
    scales = scales.repeat_interleave(weight.precision.activation_group // weight.group_size, dim=1)
    groups = weight.codes.shape[0]
    codes = codes[:, : weight.padded_columns].view(x.shape[0], groups, weight.group_size).transpose(0, 1).contiguous()
    scales = scales[:, :groups].t().contiguous()
    out = x.new_empty(x.shape[0], weight.rows)
    for block in _blocks(weight.rows, OUTPUTS_AT_A_TIME):
        widened = weight.codes[:, block].float()
        for rows in _blocks(x.shape[0], ROWS_AT_A_TIME):
            dots = torch.bmm(codes[:, rows], widened.transpose(1, 2))
            out[rows, block] = _scaled_sum(dots, codes[:, rows], scales[:, rows], weight, block)
    return out


def _scaled_sum(dots: Tensor, codes: Tensor, scales: Tensor, weight: GroupedWeight, outputs: slice) -> Tensor:
    """Add up dots [groups, rows, outputs], group after group, each with its scales (and the weights' minimum)."""
    total = torch.zeros_like(dots[0])
    code_sums = codes.sum(dim=2)  # whole numbers: exact in any order
    for group, dot in enumerate(dots):
        scale = scales[group, :, None]
        total += dot * (scale * weight.scales[group, outputs])
        if weight.minimums is not None:
            total += (scale * code_sums[group, :, None]) * weight.minimums[group, outputs]
    return total


def _columns_to_fill(weight: GroupedWeight) -> int:
    """Columns the input is padded to: whole groups of the weight, of the activations and of the rotation."""
    unit = math.lcm(weight.precision.activation_group or 1, ROTATION_GROUP if weight.precision.rotated else 1)
    return -(-weight.padded_columns // unit) * unit


def _padded(x: Tensor, columns: int) -> Tensor:
    return torch.nn.functional.pad(x, (0, columns - x.shape[1]))


def _blocks(length: int, size: int) -> Iterator[slice]:
    for start in range(0, length, size):
        yield slice(start, min(start + size, length))
