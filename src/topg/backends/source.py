"""What a back end needs to know about a model: a converted folder has it, and so has a test's model in memory."""

from __future__ import annotations

from typing import Any, Protocol

import numpy.typing as npt

from topg.errors import CheckpointError, PrecisionError
from topg.plan import Plan
from topg.precision.formats import Precision
from topg.precision.storage import Parts, check_parts


class ModelSource(Protocol):
    """A plan and its tensors, stored part by part as `Precision.parts` describes."""

    @property
    def plan(self) -> Plan:
        """The operations to run."""

    def precision(self, tensor: str) -> Precision:
        """How a tensor is stored and multiplied."""

    def shape(self, tensor: str) -> tuple[int, ...]:
        """A tensor's logical shape."""

    def part(self, tensor: str, part_name: str) -> npt.NDArray[Any]:
        """One stored array; bfloat16 comes as uint16 bit patterns."""

    def release_memory(self) -> None:
        """Let go of the memory behind arrays given so far, which are read again from their file when they are used."""


def check_shapes(model: ModelSource) -> None:
    """Raise CheckpointError unless every tensor has the shape its op needs."""
    for op in model.plan.ops:
        for name, expected in op.tensor_shapes().items():
            if model.shape(name) != expected:
                raise CheckpointError(
                    f"{op.kind} {op.name!r} needs tensor {name!r} of shape {expected}; it has {model.shape(name)}"
                )


def checked_parts(model: ModelSource, name: str) -> Parts:
    """The stored arrays of a tensor; raises CheckpointError when they do not fit its description."""
    precision, shape = model.precision(name), model.shape(name)
    arrays = {part: model.part(name, part) for part in precision.parts(shape)}
    try:
        check_parts(arrays, precision, shape)
    except PrecisionError as error:
        raise CheckpointError(f"tensor {name!r} of the converted model is damaged: {error}") from error
    return arrays
