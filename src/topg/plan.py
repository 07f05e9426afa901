"""A model as data: a flat list of operations over named buffers, built once by the model's own file.

A plan holds no arithmetic and no device.  Everything that reasons about a model reads it: the back ends, the
memory estimate, the cost table of `topg plan`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from typing import Any

from topg.errors import CheckpointError
from topg.ops import (
    Activation,
    ActivationKind,
    Add,
    Attention,
    Embed,
    Gate,
    Linear,
    Logits,
    Norm,
    NormKind,
    Op,
    Scale,
    SelectRows,
    op_class,
)
from topg.ops.rope import SCALING_KINDS, Rope
from topg.wording import shown


@dataclass(frozen=True)
class Plan:
    """The operations of one model in order, and the width of every buffer they write."""

    ops: tuple[Op, ...]
    buffers: Mapping[str, int]

    @property
    def tensor_names(self) -> tuple[str, ...]:
        """Every tensor the plan uses, each once, in order of first use."""
        return tuple(dict.fromkeys(name for op in self.ops for name in op.tensors()))

    @property
    def attention(self) -> tuple[Attention, ...]:
        """The attention ops, one per layer."""
        return tuple(op for op in self.ops if isinstance(op, Attention))

    @property
    def vocab(self) -> int:
        """Columns of the logits."""
        return self.buffers[self.ops[-1].output]

    def to_json(self) -> list[dict[str, Any]]:
        """The plan as plain data; `from_json` gives an equal plan back."""
        return [_op_to_json(op) for op in self.ops]

    @classmethod
    def from_json(cls, data: list[dict[str, Any]]) -> Plan:
        """Rebuild a plan; raises CheckpointError when the data does not describe one."""
        builder = PlanBuilder()
        for item in data:
            builder.append(_op_from_json(item))
        return builder.build()


class PlanBuilder:
    """Collects operations; every method appends one op and returns the name of the buffer it writes.

    Names are unique in a plan: a scope ("layers.0.attention") goes in front of them.  Buffers keep short names and
    are written again in every layer.
    """

    def __init__(self) -> None:
        self._ops: list[Op] = []
        self._names: set[str] = set()
        self._widths: dict[str, int] = {}
        self._scope: list[str] = []

    @contextmanager
    def scope(self, name: str) -> Iterator[None]:
        """Within the block, op and tensor names given as `.name` are put below `name`."""
        self._scope.append(name)
        yield
        self._scope.pop()

    def path(self, name: str) -> str:
        """`name` below the current scope."""
        return ".".join([*self._scope, name])

    def append(self, op: Op) -> str:
        """Add an op made by hand; raises CheckpointError when its inputs do not exist or do not fit."""
        if op.name in self._names:
            raise CheckpointError(f"two ops of the plan are named {shown(op.name)}")
        unknown = [name for name in op.inputs() if name not in self._widths]
        if unknown:
            raise CheckpointError(
                f"{op.kind} {shown(op.name)} reads buffer {shown(unknown[0])}, which nothing wrote before it"
            )
        try:
            width = op.output_width(self._widths)
        except ValueError as error:
            raise CheckpointError(str(error)) from error
        self._ops.append(op)
        self._names.add(op.name)
        self._widths[op.output] = width
        return op.output

    def build(self) -> Plan:
        """The finished plan."""
        if not self._ops or not isinstance(self._ops[-1], Logits):
            raise CheckpointError("a plan must end in a logits op")
        plan = Plan(tuple(self._ops), dict(self._widths))
        layers = [op.layer for op in plan.attention]
        if layers != list(range(len(layers))):
            raise CheckpointError(f"the attention ops are of layers {shown(layers)}; expected 0, 1, 2 and so on")
        return plan

    def width(self, buffer: str) -> int:
        """Columns of a buffer written so far."""
        return self._widths[buffer]

    def embed(self, tensor: str, vocab: int, width: int, out: str = "x") -> str:
        return self.append(Embed(self.path("embed"), out, f"{tensor}.weight", vocab, width))

    def norm(
        self, x: str, tensor: str, eps: float, *, kind: NormKind = "rms", bias: bool = False, runs: int = 1,
        out: str,
    ) -> str:  # fmt: skip
        """Normalise by the tensor `<scope>.<tensor>.weight` (and `.bias`)."""
        path = self.path(tensor)
        width = self.width(x) // runs
        return self.append(
            Norm(path, out, x, kind, f"{path}.weight", f"{path}.bias" if bias else None, width, runs, eps)
        )

    def linear(self, x: str, tensor: str, features: int, *, bias: bool = False, out: str) -> str:
        """Multiply by the tensor `<scope>.<tensor>.weight` [features, width of x] (and add `.bias`)."""
        path = self.path(tensor)
        bias_name = f"{path}.bias" if bias else None
        return self.append(Linear(path, out, x, f"{path}.weight", bias_name, self.width(x), features))

    def activation(self, x: str, function: ActivationKind, *, out: str) -> str:
        return self.append(Activation(self.path("activation"), out, x, function, self.width(x)))

    def gate(self, gate: str, up: str, function: ActivationKind, *, out: str) -> str:
        return self.append(Gate(self.path("gated"), out, gate, up, function, self.width(up)))

    def add(self, left: str, right: str, *, name: str = "residual", out: str) -> str:
        return self.append(Add(self.path(name), out, left, right, self.width(left)))

    def scale(self, x: str, factor: float, *, name: str = "scale", out: str) -> str:
        return self.append(Scale(self.path(name), out, x, factor, self.width(x)))

    def select_rows(self, x: str, *, out: str = "selected") -> str:
        return self.append(SelectRows(self.path("select_rows"), out, x, self.width(x)))

    def logits(self, x: str, tensor: str, vocab: int, *, softcap: float | None = None) -> str:
        return self.append(Logits(self.path("logits"), "logits", x, f"{tensor}.weight", self.width(x), vocab, softcap))


def _op_to_json(op: Op) -> dict[str, Any]:
    data: dict[str, Any] = {"op": op.kind} | asdict(op)
    rope = getattr(op, "rope", None)
    if isinstance(rope, Rope) and rope.scaling is not None:
        data["rope"]["scaling"] = {"kind": rope.scaling.kind} | asdict(rope.scaling)
    return data


def _op_from_json(data: Mapping[str, Any]) -> Op:
    attributes = dict(data)
    op_type = op_class(str(attributes.pop("op", None)))
    if attributes.get("rope") is not None:
        attributes["rope"] = _rope_from_json(attributes["rope"])
    known = {field.name for field in fields(op_type)}
    if set(attributes) - known:
        raise CheckpointError(f"op {shown(op_type.kind)} has no attribute {sorted(set(attributes) - known)[0]!r}")
    try:
        return op_type(**attributes)
    except TypeError as error:
        raise CheckpointError(f"op {shown(op_type.kind)} of the plan is incomplete: {error}") from error


def _rope_from_json(data: Mapping[str, Any]) -> Rope:
    scaling = data.get("scaling")
    if scaling is None:
        return Rope(data["dim"], data["theta"])
    attributes = dict(scaling)
    kind = attributes.pop("kind")
    if kind == "factors":
        attributes["factors"] = tuple(attributes["factors"])
    return Rope(data["dim"], data["theta"], SCALING_KINDS[kind](**attributes))
