"""A compiled plan: what native/engine/program.h says, over names instead of numbers.

A program is data: the compiler makes one from a plan, `assemble` builds the native engine from it, and `topg doctor`
prints it.  Buffers hold float32 rows, activations hold rows in the form that a linear multiplies.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from topg import ops
from topg.ops import ActivationKind, NormKind
from topg.precision.formats import ActivationFormat

Epilogue = Literal["store", "add", "activate", "gate"]

SCRATCH = "scratch"  # as a buffer of a row op: a row of the running thread's own, until the end of the row step


@dataclass(frozen=True)
class Activations:
    """The form of a linear's input: ActivationFormat of native/kernels/layout.h, for weights of so many columns."""

    code: ActivationFormat
    columns: int
    group: int = 0
    dot_group: int = 0
    rotated: bool = False


@dataclass(frozen=True)
class Norm:
    """Normalisation of `runs` runs of `width` values; weight and bias name tensors."""

    kind: NormKind
    weight: str
    bias: str | None
    width: int
    runs: int
    eps: float


# ---- work on whole rows ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class EmbedOp:
    weight: str
    out: str


@dataclass(frozen=True)
class NormOp:
    norm: Norm
    input: str
    out: str


@dataclass(frozen=True)
class AddOp:
    left: str
    right: str
    out: str


@dataclass(frozen=True)
class ScaleOp:
    input: str
    factor: float
    out: str


@dataclass(frozen=True)
class ActivateOp:
    function: ActivationKind
    input: str
    out: str


@dataclass(frozen=True)
class GateOp:
    function: ActivationKind
    gate: str
    up: str
    out: str


@dataclass(frozen=True)
class SelectOp:
    """Row i of `out` is the i-th of the rows whose logits are wanted."""

    input: str
    out: str


@dataclass(frozen=True)
class PrepareOp:
    """A buffer's row into the form that a linear multiplies."""

    input: str
    activations: str


@dataclass(frozen=True)
class HeadsOp:
    """Normalise where asked for, rotate, and put heads where attention finds them.  Overwrites query and key."""

    attention: ops.Attention
    query: str
    key: str
    value: str
    query_norm: Norm | None = None
    key_norm: Norm | None = None


RowOp = EmbedOp | NormOp | AddOp | ScaleOp | ActivateOp | GateOp | SelectOp | PrepareOp | HeadsOp


# ---- steps ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LinearPart:
    """One product of a linear step.

    weights  one tensor, or two of one shape whose output channels are interleaved (a gate and an up projection)
    biases   as `weights`, or none
    buffer or activations is where the result goes, the other is None
    """

    weights: tuple[str, ...]
    biases: tuple[str, ...] = ()
    epilogue: Epilogue = "store"
    function: ActivationKind | None = None
    buffer: str | None = None
    activations: str | None = None


@dataclass(frozen=True)
class RowStep:
    """Ops applied one after the other to each row.  `plan_ops` names what of the plan a step computes."""

    plan_ops: tuple[str, ...]
    ops: tuple[RowOp, ...]


@dataclass(frozen=True)
class LinearStep:
    """Linears that share an input; with `heads`, the parts are query, key and value."""

    plan_ops: tuple[str, ...]
    x: str
    parts: tuple[LinearPart, ...]
    heads: HeadsOp | None = None


@dataclass(frozen=True)
class AttentionStep:
    plan_ops: tuple[str, ...]
    attention: ops.Attention
    buffer: str | None = None
    activations: str | None = None


@dataclass(frozen=True)
class LogitsStep:
    plan_ops: tuple[str, ...]
    x: str
    weight: str
    softcap: float | None


Step = RowStep | LinearStep | AttentionStep | LogitsStep


@dataclass(frozen=True)
class Program:
    """Steps in order, the width of every buffer, and the form of all activations."""

    steps: tuple[Step, ...]
    buffers: Mapping[str, int]
    activations: Mapping[str, Activations]
