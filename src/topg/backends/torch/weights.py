"""Weights in the memory of a torch device, and how their stored parts get there."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from topg.backends.source import ModelSource, check_shapes, checked_parts
from topg.backends.torch.rotation import rotate
from topg.errors import BackendError
from topg.precision.formats import Precision
from topg.precision.rotation import ROTATION_GROUP

FLOAT32_BYTES = 4

# A float32 sum of integers is exact below 2^24; products of two codes reach 127 * 128.
LARGEST_EXACT_GROUP = 2**24 // (127 * 128)


@dataclass(frozen=True, eq=False)
class PlainWeight:
    """values [rows, columns] or [columns], in their stored type."""

    precision: Precision
    values: Tensor

    @property
    def rows(self) -> int:
        return self.values.shape[0]

    def dequantised(self, rows: Tensor | slice) -> Tensor:
        """Some rows as float32 [rows, columns]."""
        return self.values[rows].float()


@dataclass(frozen=True, eq=False)
class GroupedWeight:
    """Integer codes int8 [groups, rows, size] with float32 scales (and minimums) [groups, rows].

    A group here is the largest run of columns that has one scale in the weight and one in the activations.
    """

    precision: Precision
    columns: int
    codes: Tensor
    scales: Tensor
    minimums: Tensor | None

    @property
    def rows(self) -> int:
        return self.codes.shape[1]

    @property
    def group_size(self) -> int:
        return self.codes.shape[2]

    @property
    def padded_columns(self) -> int:
        return self.codes.shape[0] * self.codes.shape[2]

    def dequantised(self, rows: Tensor | slice) -> Tensor:
        """Some rows as float32 [rows, padded columns], still rotated where the format rotates."""
        values = self.codes[:, rows].float() * self.scales[:, rows, None]
        if self.minimums is not None:
            values = values + self.minimums[:, rows, None]
        return values.transpose(0, 1).reshape(values.shape[1], self.padded_columns)


Weight = PlainWeight | GroupedWeight


def embedding_rows(weight: Weight, rows: Tensor) -> Tensor:
    """Rows of an embedding table as float32 [rows, columns], with a rotation undone."""
    values = weight.dequantised(rows)
    if isinstance(weight, PlainWeight):
        return values
    return (rotate(values) if weight.precision.rotated else values)[:, : weight.columns]


def load_weights(model: ModelSource, device: torch.device) -> dict[str, Weight]:
    """Every tensor of the plan on `device`, each loaded once.

    Raises CheckpointError when a stored array does not fit its description, BackendError for a precision that has no
    kernel here.
    """
    check_shapes(model)
    weights = {name: _load(model, name, device) for name in model.plan.tensor_names}
    model.release_memory()
    return weights


def resident_bytes(precision: Precision, shape: tuple[int, ...]) -> int:
    """What a tensor takes in the device's memory: codes are unpacked to a byte each, scales widened to float32."""
    if not precision.grouped:
        return precision.nbytes(shape)
    assert precision.group_size is not None
    rows, columns = shape
    padded = precision.groups(columns) * precision.group_size
    per_group = 2 if precision.minimum else 1
    return rows * (padded + per_group * FLOAT32_BYTES * (padded // _smaller_group(precision)))


def _load(model: ModelSource, name: str, device: torch.device) -> Weight:
    precision, shape = model.precision(name), model.shape(name)
    parts = {part: _to_torch(array, device) for part, array in checked_parts(model, name).items()}
    if not precision.grouped:
        if precision.activations == "int8":
            raise BackendError(f"tensor {name!r}: {precision.describe()} has no kernel; int8 activations need codes")
        return PlainWeight(precision, parts["values"])
    size = _common_group(name, precision, precision.groups(shape[1]))
    minimums = _per_group(parts["minimums"], precision, size) if precision.minimum else None
    codes = _unpacked(parts["codes"], precision).view(shape[0], -1, size).transpose(0, 1).contiguous()
    return GroupedWeight(precision, shape[1], codes, _per_group(parts["scales"], precision, size), minimums)


def _common_group(name: str, precision: Precision, groups: int) -> int:
    """The smaller of weight and activation group; raises BackendError when one does not divide the other."""
    assert precision.group_size is not None
    smaller = _smaller_group(precision)
    larger = max(precision.group_size, precision.activation_group or 0)
    if smaller < 1 or larger % smaller or smaller > LARGEST_EXACT_GROUP:
        raise BackendError(
            f"tensor {name!r}: groups of {precision.group_size} weights and {precision.activation_group} activations; "
            f"one must be a multiple of the other and the smaller at most {LARGEST_EXACT_GROUP}"
        )
    if precision.rotated and groups * precision.group_size % ROTATION_GROUP:
        raise BackendError(
            f"tensor {name!r}: {groups} groups of {precision.group_size} columns cannot be rotated; "
            f"together they must be a multiple of {ROTATION_GROUP}"
        )
    return smaller


def _smaller_group(precision: Precision) -> int:
    assert precision.group_size is not None
    return min(precision.group_size, precision.activation_group or precision.group_size)


def _per_group(values: Tensor, precision: Precision, size: int) -> Tensor:
    """Scales [rows, stored groups] as float32 [groups of `size` columns, rows]."""
    assert precision.group_size is not None
    return values.float().repeat_interleave(precision.group_size // size, dim=1).t().contiguous()


def _unpacked(codes: Tensor, precision: Precision) -> Tensor:
    """Codes as int8 [rows, padded columns]; int4 has column 2i in the low nibble and 2i + 1 in the high one."""
    if precision.weights == "int8":
        return codes
    nibbles = torch.stack((codes & 15, codes >> 4), dim=-1).flatten(1).to(torch.int8)
    return nibbles if precision.minimum else nibbles - 8


def _to_torch(array: npt.NDArray[Any], device: torch.device) -> Tensor:
    """A copy on `device`; uint16 bit patterns become bfloat16."""
    if array.dtype == np.uint16:
        return torch.from_numpy(array.astype(np.int16)).view(torch.bfloat16).to(device)
    return torch.from_numpy(np.array(array)).to(device)
