"""The operations a decoder is made of.  Each class is the contract; back ends hold the arithmetic."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

from topg.errors import CheckpointError
from topg.ops.registry import Op, Workload, register
from topg.ops.rope import Rope
from topg.wording import shown

NormKind = Literal["rms", "layer"]
ActivationKind = Literal["silu", "gelu", "gelu_tanh", "relu"]


def _expect(op: Op, what: str, given: int, wanted: int) -> None:
    if given != wanted:
        raise ValueError(f"{op.kind} {shown(op.name)}: {what} is {given} wide, expected {wanted}")


# Wider than anything published; beyond them float32 overflows, or a norm divides by what rounds to zero.
MIN_EPS, MAX_EPS = 1e-30, 1.0
MIN_FACTOR, MAX_FACTOR = 1e-6, 1e6


def _check_range(op: Op, what: str, value: float | None, least: float, most: float) -> None:
    """Raise CheckpointError unless an attribute is None or within its range (which nan is not)."""
    if value is not None and not least <= value <= most:
        raise CheckpointError(f"{op.kind} {shown(op.name)}: {what} is {value:g}; expected {least:g} to {most:g}")


@register
@dataclass(frozen=True)
class Embed(Op):
    """output[r] = weight[token id of row r]; weight [vocab, width]."""

    kind: ClassVar[str] = "embed"
    tensor_fields: ClassVar[tuple[str, ...]] = ("weight",)

    weight: str
    vocab: int
    width: int

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        return {self.weight: (self.vocab, self.width)}

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

    def __post_init__(self) -> None:
        _check_range(self, "eps", self.eps, MIN_EPS, MAX_EPS)

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        return dict.fromkeys(self.tensors(), (self.width,))

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

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        bias = {self.bias: (self.out_features,)} if self.bias is not None else {}
        return {self.weight: (self.out_features, self.in_features), **bias}

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

    def __post_init__(self) -> None:
        _check_range(self, "scale", self.scale, MIN_FACTOR, MAX_FACTOR)
        _check_range(self, "softcap", self.softcap, MIN_FACTOR, MAX_FACTOR)
        if min(self.heads, self.kv_heads, self.head_dim) < 1 or self.heads % self.kv_heads:
            raise CheckpointError(
                f"attention {shown(self.name)}: {self.heads} heads of {self.head_dim} values cannot"
                f" share {self.kv_heads} key/value heads"
            )
        if self.rope is not None and self.rope.dim > self.head_dim:
            raise CheckpointError(
                f"attention {shown(self.name)}: {self.rope.dim} values of each head are rotated,"
                f" and it has {self.head_dim}"
            )
        if self.window is not None and self.window < 1:
            raise CheckpointError(f"attention {shown(self.name)}: window is {self.window}; expected 1 or more tokens")

    def output_width(self, widths: Mapping[str, int]) -> int:
        _expect(self, self.query, widths[self.query], self.heads * self.head_dim)
        _expect(self, self.key, widths[self.key], self.kv_heads * self.head_dim)
        _expect(self, self.value, widths[self.value], self.kv_heads * self.head_dim)
        return self.heads * self.head_dim

    def flops(self, work: Workload) -> int:
        return 4 * self.heads * self.head_dim * self._visible_pairs(work)

    def _visible_pairs(self, work: Workload) -> int:
        """(query, key) pairs one step looks at."""
        growing = work.tokens  # those that see everything before them
        if self.window is not None:
            growing = min(work.tokens, max(0, self.window - work.context))
        pairs = growing * work.context + growing * (growing + 1) // 2
        return pairs + (work.tokens - growing) * (self.window or 0)


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

    def __post_init__(self) -> None:
        _check_range(self, "factor", self.factor, MIN_FACTOR, MAX_FACTOR)

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

    def __post_init__(self) -> None:
        _check_range(self, "softcap", self.softcap, MIN_FACTOR, MAX_FACTOR)

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        return {self.weight: (self.vocab, self.in_features)}

    def output_width(self, widths: Mapping[str, int]) -> int:
        _expect(self, self.input, widths[self.input], self.in_features)
        return self.vocab

    def flops(self, work: Workload) -> int:
        return 2 * self.in_features * self.vocab * work.logits_rows
