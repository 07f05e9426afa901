"""The operations a decoder is made of.  Each class is the contract; back ends hold the arithmetic."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

from topg.ops.registry import Op, Workload, register
from topg.ops.rope import Rope

NormKind = Literal["rms", "layer"]
ActivationKind = Literal["silu", "gelu", "gelu_tanh", "relu"]
ACTIVATIONS: tuple[str, ...] = get_args(ActivationKind)


def _expect(op: Op, what: str, given: int, wanted: int) -> None:
    if given != wanted:
        raise ValueError(f"{op.kind} {op.name!r}: {what} is {given} wide, expected {wanted}")


@register
@dataclass(frozen=True)
class Embed(Op):
    """output[r] = weight[token id of row r]; weight [vocab, width]."""

    kind: ClassVar[str] = "embed"
    tensor_fields: ClassVar[tuple[str, ...]] = ("weight",)

    weight: str
    vocab: int
    width: int

    def output_width(self, widths: Mapping[str, int]) -> int:
        return self.width

    def flops(self, work: Workload) -> int:
        return 0


@register
@dataclass(frozen=True)
class Norm(Op):
    """Normalise each run of `width` columns by its own root mean square ("rms") or mean and variance ("layer").

    weight [width], bias [width] or None.  The input may hold several runs side by side (per-head q/k norm).
    """

    kind: ClassVar[str] = "norm"
    buffer_fields: ClassVar[tuple[str, ...]] = ("input",)
    tensor_fields: ClassVar[tuple[str, ...]] = ("weight", "bias")

    input: str
    norm: NormKind
    weight: str
    bias: str | None
    width: int
    runs: int
    eps: float

    def output_width(self, widths: Mapping[str, int]) -> int:
        _expect(self, self.input, widths[self.input], self.width * self.runs)
        return self.width * self.runs

    def flops(self, work: Workload) -> int:
        return 4 * self.width * self.runs * work.tokens


@register
@dataclass(frozen=True)
class Linear(Op):
    """output = input @ weight.T + bias; weight [out_features, in_features], bias [out_features] or None."""

    kind: ClassVar[str] = "linear"
    buffer_fields: ClassVar[tuple[str, ...]] = ("input",)
    tensor_fields: ClassVar[tuple[str, ...]] = ("weight", "bias")

    input: str
    weight: str
    bias: str | None
    in_features: int
    out_features: int

    def output_width(self, widths: Mapping[str, int]) -> int:
        _expect(self, self.input, widths[self.input], self.in_features)
        return self.out_features

    def flops(self, work: Workload) -> int:
        return 2 * self.in_features * self.out_features * work.tokens


@register
@dataclass(frozen=True)
class Attention(Op):
    """Rotary causal attention over the paged KV cache of `layer`.

    query [rows, heads * head_dim], key and value [rows, kv_heads * head_dim] hold the step's new tokens; the op
    rotates query and key, appends key and value to their sequence's pages, and attends over everything cached.
    Query head h reads KV head h // (heads / kv_heads).  Scores are multiplied by `scale`, then, where `softcap` is
    set, become softcap * tanh(score / softcap).  With `window` w a token sees itself and the w - 1 before it.
    """

    kind: ClassVar[str] = "attention"
    buffer_fields: ClassVar[tuple[str, ...]] = ("query", "key", "value")

    query: str
    key: str
    value: str
    layer: int
    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    rope: Rope | None = None
    window: int | None = None
    softcap: float | None = None

    def output_width(self, widths: Mapping[str, int]) -> int:
        _expect(self, self.query, widths[self.query], self.heads * self.head_dim)
        _expect(self, self.key, widths[self.key], self.kv_heads * self.head_dim)
        _expect(self, self.value, widths[self.value], self.kv_heads * self.head_dim)
        return self.heads * self.head_dim

    def flops(self, work: Workload) -> int:
        return 4 * self.heads * self.head_dim * self._visible_pairs(work)

    def _visible_pairs(self, work: Workload) -> int:
        """(query, key) pairs one step looks at."""
        if self.window is None:
            return work.tokens * work.context + work.tokens * (work.tokens + 1) // 2
        return sum(min(self.window, work.context + i + 1) for i in range(work.tokens))


@register
@dataclass(frozen=True)
class Activation(Op):
    """output = function(input), element by element ("gelu_tanh" is the tanh approximation)."""

    kind: ClassVar[str] = "activation"
    buffer_fields: ClassVar[tuple[str, ...]] = ("input",)

    input: str
    function: ActivationKind
    width: int

    def output_width(self, widths: Mapping[str, int]) -> int:
        _expect(self, self.input, widths[self.input], self.width)
        return self.width

    def flops(self, work: Workload) -> int:
        return 4 * self.width * work.tokens


@register
@dataclass(frozen=True)
class Gate(Op):
    """output = function(gate) * up, element by element."""

    kind: ClassVar[str] = "gate"
    buffer_fields: ClassVar[tuple[str, ...]] = ("gate", "up")

    gate: str
    up: str
    function: ActivationKind
    width: int

    def output_width(self, widths: Mapping[str, int]) -> int:
        _expect(self, self.gate, widths[self.gate], self.width)
        _expect(self, self.up, widths[self.up], self.width)
        return self.width

    def flops(self, work: Workload) -> int:
        return 5 * self.width * work.tokens


@register
@dataclass(frozen=True)
class Add(Op):
    """output = left + right."""

    kind: ClassVar[str] = "add"
    buffer_fields: ClassVar[tuple[str, ...]] = ("left", "right")

    left: str
    right: str
    width: int

    def output_width(self, widths: Mapping[str, int]) -> int:
        _expect(self, self.left, widths[self.left], self.width)
        _expect(self, self.right, widths[self.right], self.width)
        return self.width

    def flops(self, work: Workload) -> int:
        return self.width * work.tokens


@register
@dataclass(frozen=True)
class Scale(Op):
    """output = input * factor (rounded to float32)."""

    kind: ClassVar[str] = "scale"
    buffer_fields: ClassVar[tuple[str, ...]] = ("input",)

    input: str
    factor: float
    width: int

    def output_width(self, widths: Mapping[str, int]) -> int:
        _expect(self, self.input, widths[self.input], self.width)
        return self.width

    def flops(self, work: Workload) -> int:
        return self.width * work.tokens


@register
@dataclass(frozen=True)
class SelectRows(Op):
    """Keep the rows the step wants logits for; every later op sees only those."""

    kind: ClassVar[str] = "select_rows"
    buffer_fields: ClassVar[tuple[str, ...]] = ("input",)

    input: str
    width: int

    def output_width(self, widths: Mapping[str, int]) -> int:
        _expect(self, self.input, widths[self.input], self.width)
        return self.width

    def flops(self, work: Workload) -> int:
        return 0


@register
@dataclass(frozen=True)
class Logits(Op):
    """output = input @ weight.T, then softcap * tanh(x / softcap) where set; weight [vocab, in_features]."""

    kind: ClassVar[str] = "logits"
    buffer_fields: ClassVar[tuple[str, ...]] = ("input",)
    tensor_fields: ClassVar[tuple[str, ...]] = ("weight",)

    input: str
    weight: str
    in_features: int
    vocab: int
    softcap: float | None = None

    def output_width(self, widths: Mapping[str, int]) -> int:
        _expect(self, self.input, widths[self.input], self.in_features)
        return self.vocab

    def flops(self, work: Workload) -> int:
        return 2 * self.in_features * self.vocab * work.logits_rows
