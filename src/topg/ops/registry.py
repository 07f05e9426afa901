"""The registry of operations: a plan is a list of these, and a back end needs one kernel for each kind."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, TypeVar

from topg.errors import UnsupportedModelError
from topg.wording import shown


@dataclass(frozen=True)
class Workload:
    """Size of a step, for cost estimates: `tokens` new ones after `context` cached ones, `logits_rows` of logits."""

    tokens: int
    context: int
    logits_rows: int


@dataclass(frozen=True)
class Op:
    """One operation of a plan: reads named buffers, writes one named buffer, uses named tensors.

    Subclasses are frozen dataclasses whose fields are the op's attributes.  `buffer_fields` and `tensor_fields`
    say which of them name input buffers and model tensors; a tensor field may be None when the op goes without.
    A buffer is a float32 matrix [rows, width]; an op may write a buffer it reads.
    """

    kind: ClassVar[str]
    buffer_fields: ClassVar[tuple[str, ...]] = ()
    tensor_fields: ClassVar[tuple[str, ...]] = ()

    name: str
    output: str

    def inputs(self) -> tuple[str, ...]:
        """Names of the buffers this op reads."""
        return tuple(getattr(self, field) for field in self.buffer_fields)

    def tensors(self) -> tuple[str, ...]:
        """Names of the model tensors this op uses."""
        return tuple(name for field in self.tensor_fields if (name := getattr(self, field)) is not None)

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of each tensor this op uses, by name; an op that leaves it out checks its tensors itself."""
        return {}

    def output_width(self, widths: Mapping[str, int]) -> int:
        """Columns of the output buffer; raises ValueError when the input widths do not fit the attributes."""
        raise NotImplementedError

    def flops(self, work: Workload) -> int:
        """Floating-point (or integer) operations of a step; a multiply and an add count as two."""
        raise NotImplementedError


OpType = TypeVar("OpType", bound=type[Op])
_KINDS: dict[str, type[Op]] = {}


def register(op: OpType) -> OpType:
    """Class decorator: makes an op usable in plans under its `kind`."""
    if op.kind in _KINDS:
        raise ValueError(f"op kind {op.kind!r} is registered twice: {_KINDS[op.kind].__name__} and {op.__name__}")
    _KINDS[op.kind] = op
    return op


def registered_kinds() -> tuple[str, ...]:
    """All op kinds, sorted."""
    return tuple(sorted(_KINDS))


def op_class(kind: str) -> type[Op]:
    """The op registered as `kind`; raises UnsupportedModelError naming what exists."""
    if kind not in _KINDS:
        raise UnsupportedModelError(
            f"op {shown(kind)} is not registered; registered ops: {', '.join(registered_kinds())}"
        )
    return _KINDS[kind]
