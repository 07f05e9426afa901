"""Plans and native programs in numpy, for one sequence from its first token: what a compiler must keep the same.

Float64 throughout and no rounding to any precision, so that the two agree to many digits unless a value was lost.  The
memory of a program is hostile: buffers begin as NaN, the scratch row is NaN again in every row step, rows of a row step
come in a random order, and heads are overwritten.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from topg import ops
from topg.backends.native import program as native
from topg.plan import Plan

Floats = npt.NDArray[np.float64]
Tensors = Mapping[str, Floats]


def run_plan(plan: Plan, tensors: Tensors, tokens: Sequence[int], selected: Sequence[int]) -> Floats:
    """Logits [selected, vocab] of the plan as it is written."""
    buffers: dict[str, Floats] = {}
    for op in plan.ops:
        inputs = [buffers[name] for name in op.inputs()]
        buffers[op.output] = _plan_op(op, inputs, tensors, tokens, selected)
    return buffers[plan.ops[-1].output]


def _plan_op(  # noqa: PLR0911
    op: ops.Op, inputs: list[Floats], tensors: Tensors, tokens: Sequence[int], selected: Sequence[int]
) -> Floats:
    match op:
        case ops.Embed():
            return tensors[op.weight][list(tokens)]
        case ops.Norm():
            return normed(inputs[0], op.norm, tensors[op.weight], _bias(tensors, op.bias), op.width, op.eps)
        case ops.Linear():
            return inputs[0] @ tensors[op.weight].T + _bias(tensors, op.bias)
        case ops.Attention():
            return attend(op, *(rotated(op, x) for x in inputs[:2]), inputs[2])
        case ops.Activation():
            return FUNCTIONS[op.function](inputs[0])
        case ops.Gate():
            return FUNCTIONS[op.function](inputs[0]) * inputs[1]
        case ops.Add():
            return inputs[0] + inputs[1]
        case ops.Scale():
            return inputs[0] * op.factor
        case ops.SelectRows():
            return inputs[0][list(selected)]
        case ops.Logits():
            return capped(inputs[0] @ tensors[op.weight].T, op.softcap)
    raise AssertionError(op.kind)


@dataclass
class ProgramRun:
    """The memory of a program, and its steps one after the other."""

    program: native.Program
    tensors: Tensors
    tokens: Sequence[int]
    selected: Sequence[int]
    seed: int = 0
    queries: dict[int, Floats] = field(default_factory=dict)
    keys: dict[int, Floats] = field(default_factory=dict)
    values: dict[int, Floats] = field(default_factory=dict)

    def __post_init__(self) -> None:
        rows = len(self.tokens)
        self.rng = np.random.default_rng(self.seed)
        self.buffers = {name: np.full((rows, width), np.nan) for name, width in self.program.buffers.items()}
        forms = self.program.activations.items()
        self.activations = {name: np.full((rows, form.columns), np.nan) for name, form in forms}
        self.rows = list(range(rows))

    def logits(self) -> Floats:
        for step in self.program.steps:
            match step:
                case native.RowStep():
                    self._row_step(step)
                case native.LinearStep():
                    self._linear_step(step)
                case native.AttentionStep():
                    result = attend(step.attention, self.queries[0], self.keys[step.attention.layer],
                                    self.values[step.attention.layer])  # fmt: skip
                    self._write(step.buffer, step.activations, result)
                case native.LogitsStep():
                    x = self.activations[step.x][self.rows]
                    return capped(x @ self.tensors[step.weight].T, step.softcap)
        raise AssertionError("no logits step")

    def _write(self, buffer: str | None, activations: str | None, result: Floats) -> None:
        assert (buffer is None) != (activations is None)
        target = self.buffers[buffer] if buffer is not None else self.activations[str(activations)]
        target[self.rows] = result

    # ---- rows -------------------------------------------------------------------------------------------------

    def _row_step(self, step: native.RowStep) -> None:
        if any(isinstance(op, native.SelectOp) for op in step.ops):
            self.rows = list(range(len(self.selected)))
        for row in self.rng.permutation(self.rows).tolist():
            scratch = np.full(max(self.program.buffers.values()), np.nan)
            for op in step.ops:
                self._row_op(op, row, scratch)

    def _row_op(self, op: native.RowOp, row: int, scratch: Floats) -> None:
        def at(name: str, width: int | None = None) -> Floats:
            return scratch[:width] if name == native.SCRATCH else self.buffers[name][row]

        match op:
            case native.EmbedOp():
                at(op.out)[:] = self.tensors[op.weight][self.tokens[row]]
            case native.NormOp():
                width = op.norm.runs * op.norm.width
                at(op.out, width)[:] = self._normed(op.norm, at(op.input, width))
            case native.AddOp():
                width = len(at(op.out))
                at(op.out)[:] = at(op.left, width) + at(op.right, width)
            case native.ScaleOp():
                at(op.out)[:] = at(op.input, len(at(op.out))) * op.factor
            case native.ActivateOp():
                at(op.out)[:] = FUNCTIONS[op.function](at(op.input, len(at(op.out))))
            case native.GateOp():
                width = len(at(op.out))
                at(op.out)[:] = FUNCTIONS[op.function](at(op.gate, width)) * at(op.up, width)
            case native.SelectOp():
                at(op.out)[:] = self.buffers[op.input][self.selected[row]]
            case native.PrepareOp():
                target = self.activations[op.activations][row]
                target[:] = at(op.input, len(target))
            case native.HeadsOp():
                self._heads(op, [row])

    def _normed(self, norm: native.Norm, x: Floats) -> Floats:
        return normed(x, norm.kind, self.tensors[norm.weight], _bias(self.tensors, norm.bias), norm.width, norm.eps)

    def _heads(self, op: native.HeadsOp, rows: list[int]) -> None:
        """Normalise and rotate in place, as the engine does, and store."""
        sides = ((op.query, op.query_norm, self.queries, 0), (op.key, op.key_norm, self.keys, op.attention.layer))
        for name, norm, store, place in sides:
            x = self.buffers[name]
            if norm is not None:
                x[rows] = self._normed(norm, x[rows])
            x[rows] = rotated(op.attention, x, rows)
            store.setdefault(place, np.full_like(x, np.nan))[rows] = x[rows]
        value = self.buffers[op.value]
        self.values.setdefault(op.attention.layer, np.full_like(value, np.nan))[rows] = value[rows]

    # ---- linears ----------------------------------------------------------------------------------------------

    def _linear_step(self, step: native.LinearStep) -> None:
        x = self.activations[step.x][self.rows]
        for part in step.parts:
            products = [x @ self.tensors[name].T for name in part.weights]
            if part.biases:
                products = [x + self.tensors[name] for x, name in zip(products, part.biases, strict=True)]
            self._finish(part, products)
        if step.heads is not None:
            self._heads(step.heads, self.rows)

    def _finish(self, part: native.LinearPart, products: list[Floats]) -> None:
        match part.epilogue:
            case "store":
                result = products[0]
            case "add":
                result = self.buffers[str(part.buffer)][self.rows] + products[0]
            case "activate":
                result = FUNCTIONS[str(part.function)](products[0])
            case "gate":
                result = FUNCTIONS[str(part.function)](products[0]) * products[1]
        self._write(part.buffer, part.activations, result)


# ---- arithmetic -----------------------------------------------------------------------------------------------------

# Any function will do, as long as each name has another one.
FUNCTIONS: Mapping[str, Callable[[Floats], Floats]] = {
    "silu": lambda x: x / (1 + np.exp(-x)),
    "gelu": lambda x: x * np.tanh(x),
    "gelu_tanh": np.tanh,
    "relu": lambda x: np.maximum(x, 0),
}


def _bias(tensors: Tensors, name: str | None) -> Floats | float:
    return 0.0 if name is None else tensors[name]


def normed(x: Floats, kind: str, weight: Floats, bias: Floats | float, width: int, eps: float) -> Floats:
    runs = x.reshape(*x.shape[:-1], -1, width)
    centred = runs - runs.mean(-1, keepdims=True) if kind == "layer" else runs
    scaled: Floats = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + eps) * weight + bias
    return scaled.reshape(x.shape)


def rotated(op: ops.Attention, x: Floats, rows: Sequence[int] | None = None) -> Floats:
    """Rows of query or key heads [tokens, heads * head_dim], turned by their positions."""
    positions = np.arange(len(x)) if rows is None else np.array(rows)
    heads = x[positions].reshape(len(positions), -1, op.head_dim).copy()
    if op.rope is not None:
        angles, half = op.rope.angles(positions)[:, None], op.rope.dim // 2
        left, right = heads[..., :half].copy(), heads[..., half : 2 * half].copy()
        heads[..., :half] = left * np.cos(angles) - right * np.sin(angles)
        heads[..., half : 2 * half] = right * np.cos(angles) + left * np.sin(angles)
    return heads.reshape(len(positions), -1)


def attend(op: ops.Attention, query: Floats, key: Floats, value: Floats) -> Floats:
    rows = len(query)
    q = query.reshape(rows, op.kv_heads, -1, op.head_dim)
    k, v = key.reshape(rows, op.kv_heads, op.head_dim), value.reshape(rows, op.kv_heads, op.head_dim)
    scores = capped(np.einsum("qhgd,khd->hgqk", q, k) * op.scale, op.softcap)
    distance = np.arange(rows)[:, None] - np.arange(rows)
    hidden = (distance < 0) | (distance >= (op.window or rows))
    weights = np.where(hidden, 0, np.exp(scores - scores.max()))
    weights /= weights.sum(-1, keepdims=True)
    return np.einsum("hgqk,khd->qhgd", weights, v).reshape(rows, -1)


def capped(x: Floats, cap: float | None) -> Floats:
    return x if cap is None else cap * np.tanh(x / cap)
