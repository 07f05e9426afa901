"""Small decoders put together by hand on the native engine, and the same arithmetic in float64."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import numpy.typing as npt

from topg import _native
from topg.precision.formats import FLOAT32, Precision
from topg.precision.quantise import dequantise, quantise
from topg.precision.rotation import ROTATION_GROUP

FloatArray = npt.NDArray[np.float32]
Exact = npt.NDArray[np.float64]

Form = Literal["fused", "plain", "parallel"]

EPS = 1e-5


@dataclass(frozen=True)
class Shape:
    """`window` and `softcap` of attention; 0 for none."""

    vocab: int = 100
    hidden: int = 64
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    intermediate: int = 128
    layers: int = 2
    window: int = 0
    softcap: float = 0.0


@dataclass(frozen=True)
class Request:
    """New tokens of a sequence, from position `start` on, with its page table; wanted as the engine codes it."""

    tokens: Sequence[int]
    start: int
    pages: Sequence[int]
    wanted: int = 2


@dataclass(eq=False)
class TinyModel:
    """A decoder of random weights.

    form  "fused": what the compiler makes of a LLaMA; heads, gates and residuals are finished where they are multiplied
          "plain": every result goes through a buffer, as models with odd shapes need it
          "parallel": fused, and attention and MLP read the same rows, as in GPT-NeoX
    """

    precision: Precision = FLOAT32
    shape: Shape = field(default_factory=Shape)
    form: Form = "fused"
    seed: int = 0

    def __post_init__(self) -> None:
        rng = np.random.default_rng(self.seed)
        s = self.shape
        q_width, kv_width = s.heads * s.head_dim, s.kv_heads * s.head_dim
        self.tensors: dict[str, FloatArray] = {"embed": _random(rng, s.vocab, s.hidden) * 8}
        for layer in range(s.layers):
            shapes = {
                "q": (q_width, s.hidden), "k": (kv_width, s.hidden), "v": (kv_width, s.hidden),
                "o": (s.hidden, q_width), "gate": (s.intermediate, s.hidden), "up": (s.intermediate, s.hidden),
                "down": (s.hidden, s.intermediate),
            }  # fmt: skip
            self.tensors |= {f"{layer}.{name}": _random(rng, *shape) for name, shape in shapes.items()}
        self.norm = rng.uniform(0.5, 1.5, s.hidden).astype(np.float32)
        self.bias = rng.normal(size=q_width).astype(np.float32)
        angles = np.arange(2048)[:, None] * 100.0 ** -(np.arange(s.head_dim // 2) / (s.head_dim // 2))
        self.cos, self.sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)

    # ---- on the engine ----------------------------------------------------------------------------------------

    def engine(
        self, isa: str = "", threads: int = 1, *, rows: int = 256, pages: int = 40, kv: str = "float32"
    ) -> _native.Engine:
        return _Builder(self, _native.Engine(isa, threads, rows, rows, 2048), kv, pages).build()

    def weight(self, engine: _native.Engine, *names: str) -> int:
        rows, columns = self.tensors[names[0]].shape
        sources: list[_native.StoredParts] = []
        for name in names:
            parts = quantise(self.tensors[name], self.precision)
            values = parts["codes"] if self.precision.grouped else parts["values"]
            sources.append((values, parts.get("scales"), parts.get("minimums")))
        p = self.precision
        return engine.add_weight(
            p.weights, p.activations, p.scale or "none", p.group_size or 0, p.minimum, p.rotated, rows, columns, sources
        )

    # ---- in float64 -------------------------------------------------------------------------------------------

    def logits(self, tokens: Sequence[int]) -> Exact:
        """Logits at every position of a sequence; activations are not rounded."""
        s, position = self.shape, np.arange(len(tokens))
        x = self._values("embed")[list(tokens)]
        for layer in range(s.layers):
            normed = self._norm(x)
            q = (normed @ self._values(f"{layer}.q").T + self.bias).reshape(len(tokens), s.heads, s.head_dim)
            k, v = (
                (normed @ self._values(f"{layer}.{name}").T).reshape(len(tokens), s.kv_heads, s.head_dim)
                for name in ("k", "v")
            )
            attended = self._attend(self._rotate(q, position), self._rotate(k, position), v)
            x = x + attended @ self._values(f"{layer}.o").T
            normed = normed if self.form == "parallel" else self._norm(x)
            gate, up = (normed @ self._values(f"{layer}.{name}").T for name in ("gate", "up"))
            x = x + (gate / (1 + np.exp(-gate)) * up) @ self._values(f"{layer}.down").T
        return self._norm(x) @ self._values("embed").T

    def _values(self, name: str) -> Exact:
        tensor = self.tensors[name]
        return dequantise(quantise(tensor, self.precision), self.precision, tensor.shape).astype(np.float64)

    def _norm(self, x: Exact) -> Exact:
        return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + EPS) * self.norm

    def _rotate(self, x: Exact, position: npt.NDArray[np.int64]) -> Exact:
        half = self.shape.head_dim // 2
        cos, sin = self.cos[position, None], self.sin[position, None]
        left, right = x[..., :half], x[..., half:]
        return np.concatenate([left * cos - right * sin, right * cos + left * sin], axis=-1)

    def _attend(self, q: Exact, k: Exact, v: Exact) -> Exact:
        s = self.shape
        k, v = (np.repeat(part, s.heads // s.kv_heads, axis=1) for part in (k, v))
        scores = np.einsum("qhd,khd->hqk", q, k) * s.head_dim**-0.5
        if s.softcap:
            scores = s.softcap * np.tanh(scores / s.softcap)
        distance = np.arange(len(q))[:, None] - np.arange(len(q))
        hidden = (distance < 0) | (bool(s.window) & (distance >= s.window))
        weights = np.exp(np.where(hidden, -np.inf, scores - scores.max(axis=-1, keepdims=True)))
        weights /= weights.sum(axis=-1, keepdims=True)
        return np.einsum("hqk,khd->qhd", weights, v).reshape(len(q), -1)


@dataclass(eq=False)
class _Builder:
    model: TinyModel
    engine: _native.Engine
    kv: str
    pages: int

    def build(self) -> _native.Engine:
        model, engine, s = self.model, self.engine, self.model.shape
        engine.set_cache(self.kv, s.layers, s.kv_heads, s.head_dim, 64, self.pages)
        self.x, self.selected = engine.add_buffer(s.hidden), engine.add_buffer(s.hidden)
        self.q = engine.add_buffer(s.heads * s.head_dim)
        self.k, self.v = (engine.add_buffer(s.kv_heads * s.head_dim) for _ in range(2))
        self.gate, self.up = engine.add_buffer(s.intermediate), engine.add_buffer(s.intermediate)
        self.residual = engine.add_buffer(s.hidden)
        self.hidden_input, self.parallel_input = self._activations(s.hidden), self._activations(s.hidden)
        self.attended = self._activations(s.heads * s.head_dim)
        self.gated = self._activations(s.intermediate)
        self.norm = _native.Norm("rms", engine.add_vector(model.norm), _native.NONE, s.hidden, 1, EPS)
        self.bias = engine.add_vector(model.bias)
        self.rope = engine.add_rope(s.head_dim // 2)
        engine.set_rope(self.rope, model.cos, model.sin)
        embed = model.weight(engine, "embed")
        engine.add_row_step([_native.RowOp.embed(embed, self.x), *self._normed_for_both(self.x)])
        for layer in range(s.layers):
            attention = engine.add_attention(layer, s.heads, s.head_dim**-0.5, s.softcap, s.window, self.rope)
            (self._plain_layer if model.form == "plain" else self._fused_layer)(layer, attention, layer + 1 == s.layers)
        engine.add_row_step([_native.RowOp.select(self.x, self.selected), *self._normed(self.selected)])
        engine.add_logits_step(self.hidden_input, embed, 0.0)
        engine.finish()
        return engine

    def _activations(self, columns: int) -> int:
        p = self.model.precision
        dot_group = min(p.group_size, p.activation_group) if p.group_size and p.activation_group else 0
        return self.engine.add_activations(p.activations, p.activation_group or 0, dot_group, p.rotated, columns)

    def _normed(self, buffer: int) -> list[_native.RowOp]:
        op = _native.RowOp
        return [op.norm(self.norm, buffer, _native.SCRATCH), op.prepare(_native.SCRATCH, self.hidden_input)]

    def _normed_for_both(self, buffer: int) -> list[_native.RowOp]:
        """What attention reads, and what the MLP does if it reads the same rows."""
        is_parallel = self.model.form == "parallel"
        ops = [_native.RowOp.prepare(_native.SCRATCH, self.parallel_input)] if is_parallel else []
        return self._normed(buffer) + ops

    def _part(
        self, name: str, buffer: int, epilogue: str = "store", bias: int = _native.NONE, activations: int = _native.NONE
    ) -> _native.LinearPart:
        weight = self.model.weight(self.engine, *name.split("+"))
        return _native.LinearPart(weight, bias, epilogue, "silu", buffer, activations)

    def _qkv(self, layer: int) -> list[_native.LinearPart]:
        return [
            self._part(f"{layer}.q", self.q, bias=self.bias),
            self._part(f"{layer}.k", self.k),
            self._part(f"{layer}.v", self.v),
        ]

    def _heads(self, attention: int) -> _native.Heads:
        return _native.Heads(attention, self.q, self.k, self.v, _native.Norm(), _native.Norm())

    def _fused_layer(self, layer: int, attention: int, is_last: bool) -> None:
        engine = self.engine
        engine.add_linear_step(self.hidden_input, self._qkv(layer), self._heads(attention))
        shape = self.model.shape
        if shape.heads // shape.kv_heads * shape.head_dim % ROTATION_GROUP:
            engine.add_attention_step(attention, self.q, _native.NONE)
            engine.add_row_step([_native.RowOp.prepare(self.q, self.attended)])
        else:
            engine.add_attention_step(attention, _native.NONE, self.attended)
        engine.add_linear_step(self.attended, [self._part(f"{layer}.o", self.x, "add")], None)
        if self.model.form == "fused":
            engine.add_row_step(self._normed(self.x))
        gate = self._part(f"{layer}.gate+{layer}.up", _native.NONE, "gate", activations=self.gated)
        mlp_input = self.parallel_input if self.model.form == "parallel" else self.hidden_input
        engine.add_linear_step(mlp_input, [gate], None)
        engine.add_linear_step(self.gated, [self._part(f"{layer}.down", self.x, "add")], None)
        if not is_last:
            engine.add_row_step(self._normed_for_both(self.x))

    def _plain_layer(self, layer: int, attention: int, is_last: bool) -> None:
        engine, op = self.engine, _native.RowOp
        engine.add_linear_step(self.hidden_input, self._qkv(layer), None)
        engine.add_row_step([op.heads(self._heads(attention))])
        engine.add_attention_step(attention, self.q, _native.NONE)
        engine.add_row_step([op.prepare(self.q, self.attended)])
        engine.add_linear_step(self.attended, [self._part(f"{layer}.o", self.residual)], None)
        engine.add_row_step([op.add(self.x, self.residual, self.x), *self._normed(self.x)])
        parts = [self._part(f"{layer}.gate", self.gate), self._part(f"{layer}.up", self.up)]
        engine.add_linear_step(self.hidden_input, parts, None)
        gated = op.gate("silu", self.gate, self.up, self.gate)
        engine.add_row_step([gated, op.prepare(self.gate, self.gated)])
        engine.add_linear_step(self.gated, [self._part(f"{layer}.down", self.residual)], None)
        ops = [op.add(self.x, self.residual, self.x)]
        engine.add_row_step(ops if is_last else [*ops, *self._normed(self.x)])


def run(engine: _native.Engine, *requests: Request) -> FloatArray:
    return engine.run(*arrays(*requests))


def arrays(*requests: Request) -> tuple[_native.Int32, ...]:
    """The arguments of Engine.run and Engine.greedy."""
    offsets = np.cumsum([0, *(len(request.pages) for request in requests)])
    columns = (
        [token for request in requests for token in request.tokens],
        [request.start for request in requests],
        [len(request.tokens) for request in requests],
        offsets,
        [page for request in requests for page in request.pages],
    )
    wanted = np.array([request.wanted for request in requests], np.uint8)
    return (*(np.array(column, np.int32) for column in columns), wanted)


def _random(rng: np.random.Generator, rows: int, columns: int) -> FloatArray:
    return (rng.normal(size=(rows, columns)) / np.sqrt(columns)).astype(np.float32)
