"""What a back end needs to know about a model: a converted folder has it, and so has a test's model in memory."""

from __future__ import annotations

from typing import Any, Protocol

import numpy.typing as npt

from topg.plan import Plan
from topg.precision.formats import Precision


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
