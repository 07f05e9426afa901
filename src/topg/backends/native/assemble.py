"""From a program and a model's tensors to the native engine: weights packed, names turned into ids."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from topg import _native, ops
from topg.backends.native import program as native
from topg.backends.native.rope_tables import RopeTables
from topg.backends.source import ModelSource, checked_parts
from topg.errors import BackendError
from topg.kv.pages import KVGeometry
from topg.precision.formats import Precision
from topg.precision.storage import Parts, decode, plain_storage

VECTOR_LANES = 16  # kLanes of native/kernels/layout.h: channels of a gate that stand side by side


@dataclass(frozen=True)
class EngineLimits:
    """What an engine is sized for.

    rows       tokens of a step, and rows of it whose logits are wanted
    positions  tokens of a sequence
    """

    isa: str
    threads: int
    rows: int
    positions: int


@dataclass(frozen=True, eq=False)
class Assembled:
    """An engine ready to run, and the tables of angles that it must be given."""

    engine: _native.Engine
    ropes: RopeTables


def assemble(
    program: native.Program, model: ModelSource, kv: KVGeometry, page_count: int, limits: EngineLimits
) -> Assembled:
    """Build the engine; every weight is packed once and its stored form let go of.

    Raises BackendError naming the tensor that has no kernel, CheckpointError for a damaged one.
    """
    engine = _native.Engine(limits.isa, limits.threads, limits.rows, limits.rows, limits.positions)
    engine.set_cache(kv.dtype, kv.layers, kv.kv_heads, kv.head_dim, kv.tokens_per_page, page_count)
    assembler = _Assembler(engine, model, program)
    for step in program.steps:
        assembler.add_step(step)
    engine.finish()
    return Assembled(engine, RopeTables(engine, assembler.ropes))


@dataclass(eq=False)
class _Assembler:
    engine: _native.Engine
    model: ModelSource
    program: native.Program
    weights: dict[tuple[str, ...], int] = field(default_factory=dict)
    vectors: dict[tuple[str, ...], int] = field(default_factory=dict)
    ropes: dict[ops.Rope, int] = field(default_factory=dict)
    attentions: dict[ops.Attention, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.buffers = {name: self.engine.add_buffer(width) for name, width in self.program.buffers.items()}
        self.buffers[native.SCRATCH] = _native.SCRATCH
        self.activations = {
            name: self.engine.add_activations(form.code, form.group, form.dot_group, form.rotated, form.columns)
            for name, form in self.program.activations.items()
        }

    # ---- steps ------------------------------------------------------------------------------------------------

    def add_step(self, step: native.Step) -> None:
        match step:
            case native.RowStep():
                self.engine.add_row_step([self._row_op(op) for op in step.ops])
            case native.LinearStep():
                heads = None if step.heads is None else self._heads(step.heads)
                self.engine.add_linear_step(self.activations[step.x], [self._part(part) for part in step.parts], heads)
            case native.AttentionStep():
                buffer, activations = self._target(step.buffer, step.activations)
                self.engine.add_attention_step(self._attention(step.attention), buffer, activations)
            case native.LogitsStep():
                weight = self._weight((step.weight,))
                self.engine.add_logits_step(self.activations[step.x], weight, step.softcap or 0.0)

    def _row_op(self, op: native.RowOp) -> _native.RowOp:
        kind, at = _native.RowOp, self.buffers
        match op:
            case native.EmbedOp():
                made = kind.embed(self._weight((op.weight,)), at[op.out])
            case native.NormOp():
                made = kind.norm(self._norm(op.norm), at[op.input], at[op.out])
            case native.AddOp():
                made = kind.add(at[op.left], at[op.right], at[op.out])
            case native.ScaleOp():
                made = kind.scale(at[op.input], op.factor, at[op.out])
            case native.ActivateOp():
                made = kind.activate(op.function, at[op.input], at[op.out])
            case native.GateOp():
                made = kind.gate(op.function, at[op.gate], at[op.up], at[op.out])
            case native.SelectOp():
                made = kind.select(at[op.input], at[op.out])
            case native.PrepareOp():
                made = kind.prepare(at[op.input], self.activations[op.activations])
            case native.HeadsOp():
                made = kind.heads(self._heads(op))
        return made

    def _heads(self, op: native.HeadsOp) -> _native.Heads:
        query, key, value = (self.buffers[name] for name in (op.query, op.key, op.value))
        query_norm, key_norm = (
            _native.Norm() if norm is None else self._norm(norm) for norm in (op.query_norm, op.key_norm)
        )
        return _native.Heads(self._attention(op.attention), query, key, value, query_norm, key_norm)

    def _part(self, part: native.LinearPart) -> _native.LinearPart:
        weight = self._weight(part.weights)
        bias = self._vector(part.biases) if part.biases else _native.NONE
        return _native.LinearPart(
            weight, bias, part.epilogue, part.function or "silu", *self._target(part.buffer, part.activations)
        )

    def _target(self, buffer: str | None, activations: str | None) -> tuple[int, int]:
        return (
            _native.NONE if buffer is None else self.buffers[buffer],
            _native.NONE if activations is None else self.activations[activations],
        )

    # ---- tables -----------------------------------------------------------------------------------------------

    def _attention(self, op: ops.Attention) -> int:
        if op not in self.attentions:
            rope = _native.NONE if op.rope is None else self._rope(op.rope)
            self.attentions[op] = self.engine.add_attention(
                op.layer, op.heads, op.scale, op.softcap or 0.0, op.window or 0, rope
            )
        return self.attentions[op]

    def _rope(self, rope: ops.Rope) -> int:
        if rope not in self.ropes:
            self.ropes[rope] = self.engine.add_rope(rope.dim // 2)
        return self.ropes[rope]

    def _norm(self, norm: native.Norm) -> _native.Norm:
        bias = _native.NONE if norm.bias is None else self._vector((norm.bias,))
        return _native.Norm(norm.kind, self._vector((norm.weight,)), bias, norm.width, norm.runs, norm.eps)

    def _vector(self, names: tuple[str, ...]) -> int:
        """A norm's weight or a bias; two biases are interleaved as the channels of their weights are."""
        if names not in self.vectors:
            values = [_float_vector(self.model, name) for name in names]
            self.vectors[names] = self.engine.add_vector(values[0] if len(values) == 1 else _interleaved(values))
        return self.vectors[names]

    def _weight(self, names: tuple[str, ...]) -> int:
        """A packed weight.  An embedding that is also the head is packed once."""
        if names not in self.weights:
            self.weights[names] = self._packed(names)
            self.model.release_memory()
        return self.weights[names]

    def _packed(self, names: tuple[str, ...]) -> int:
        precision, (rows, columns) = self.model.precision(names[0]), self.model.shape(names[0])
        sources = [_source(checked_parts(self.model, name)) for name in names]
        try:
            return self.engine.add_weight(
                precision.weights, precision.activations, precision.scale or "none", precision.group_size or 0,
                precision.minimum, precision.rotated, rows, columns, sources,
            )  # fmt: skip
        except ValueError as error:
            raise BackendError(f"tensor {names[0]!r}: {_described(precision)} has no native kernel: {error}") from error


def _described(precision: Precision) -> str:
    scale = f" with {precision.scale} scales" if precision.scale else ""
    return precision.describe() + scale


def _source(parts: Parts) -> _native.StoredParts:
    """Values or codes, scales, minimums; a file may hold them where they are not aligned."""
    values, scales, minimums = (
        None if part is None else np.require(part, requirements=("C", "A"))
        for part in (parts.get("values", parts.get("codes")), parts.get("scales"), parts.get("minimums"))
    )
    assert values is not None
    return values, scales, minimums


def _float_vector(model: ModelSource, name: str) -> npt.NDArray[np.float32]:
    precision = model.precision(name)
    return decode(checked_parts(model, name)["values"], plain_storage(precision))


def _interleaved(vectors: list[npt.NDArray[np.float32]]) -> npt.NDArray[np.float32]:
    """Runs of 16 values of each vector in turn, the last ones filled up with zeros."""
    missing = -len(vectors[0]) % VECTOR_LANES
    runs = [np.pad(vector, (0, missing)).reshape(-1, VECTOR_LANES) for vector in vectors]
    return np.stack(runs, axis=1).reshape(-1)
