"""One kernel per op kind: the op and the step's context in, the op's output buffer out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from topg.backends.torch.attention import Attend, rotate_pairs
from topg.backends.torch.cache import PagedCache
from topg.backends.torch.elementwise import ACTIVATION_FUNCTIONS, layer_norm, rms_norm, softcap
from topg.backends.torch.linear import linear
from topg.backends.torch.step import Rows
from topg.backends.torch.weights import Weight, embedding_rows
from topg.ops import Activation, Add, Attention, Embed, Gate, Linear, Logits, Norm, Rope, Scale, SelectRows


@dataclass(frozen=True, eq=False)
class Context:
    """What kernels read during one step; `buffers` holds the outputs of the ops before, float32 [rows, width]."""

    rows: Rows
    weights: Mapping[str, Weight]
    cache: PagedCache
    attend: Attend
    buffers: dict[str, Tensor] = field(default_factory=dict)
    rotary: dict[Rope, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def vector(self, tensor: str) -> Tensor:
        """A norm weight or bias as float32 [width]."""
        return self.weights[tensor].dequantised(slice(None))

    def cos_sin(self, rope: Rope) -> tuple[Tensor, Tensor]:
        """cos and sin [rows, dim/2] of the rows' positions, float32, the same for all layers that share a rope."""
        if rope not in self.rotary:
            self.rotary[rope] = _cos_sin(rope, self.rows)
        return self.rotary[rope]


# The first argument is the op of that kind.
Kernel = Callable[[Any, Context], Tensor]


def embed(op: Embed, context: Context) -> Tensor:
    return embedding_rows(context.weights[op.weight], context.rows.tokens)


def norm(op: Norm, context: Context) -> Tensor:
    x = context.buffers[op.input]
    function = rms_norm if op.norm == "rms" else layer_norm
    bias = context.vector(op.bias) if op.bias else None
    runs = x.view(x.shape[0], op.runs, op.width)
    return function(runs, context.vector(op.weight), bias, op.eps).view(x.shape)


def linear_kernel(op: Linear, context: Context) -> Tensor:
    product = linear(context.buffers[op.input], context.weights[op.weight])
    return product + context.vector(op.bias) if op.bias else product


def attention(op: Attention, context: Context) -> Tensor:
    query, key, value = (
        context.buffers[name].view(-1, heads, op.head_dim)
        for name, heads in ((op.query, op.heads), (op.key, op.kv_heads), (op.value, op.kv_heads))
    )
    if op.rope is not None:
        cos, sin = context.cos_sin(op.rope)
        query, key = rotate_pairs(query, cos, sin), rotate_pairs(key, cos, sin)
    context.cache.append(op.layer, context.rows.pages, context.rows.slots, key, value)
    return torch.cat(
        [
            context.attend(op, query[rows], part.start, _reader(context.cache, op.layer, part.pages))
            for part, rows in context.rows.slices
        ]
    ).flatten(1)


def activation(op: Activation, context: Context) -> Tensor:
    return ACTIVATION_FUNCTIONS[op.function](context.buffers[op.input])


def gate(op: Gate, context: Context) -> Tensor:
    return ACTIVATION_FUNCTIONS[op.function](context.buffers[op.gate]) * context.buffers[op.up]


def add(op: Add, context: Context) -> Tensor:
    return context.buffers[op.left] + context.buffers[op.right]


def scale(op: Scale, context: Context) -> Tensor:
    return context.buffers[op.input] * op.factor


def select_rows(op: SelectRows, context: Context) -> Tensor:
    return context.buffers[op.input][context.rows.selected]


def logits(op: Logits, context: Context) -> Tensor:
    return softcap(linear(context.buffers[op.input], context.weights[op.weight]), op.softcap)


KERNELS: Mapping[str, Kernel] = {
    Embed.kind: embed,
    Norm.kind: norm,
    Linear.kind: linear_kernel,
    Attention.kind: attention,
    Activation.kind: activation,
    Gate.kind: gate,
    Add.kind: add,
    Scale.kind: scale,
    SelectRows.kind: select_rows,
    Logits.kind: logits,
}


def _reader(cache: PagedCache, layer: int, pages: Any) -> Callable[[int, int], tuple[Tensor, Tensor]]:
    return lambda first, last: cache.read(layer, pages, first, last)


def _cos_sin(rope: Rope, rows: Rows) -> tuple[Tensor, Tensor]:
    # Position by position: numpy, too, may round the last elements of an array differently.
    angles = [rope.angles(np.array([position])) for position in rows.positions]
    factor = np.float32(rope.attention_factor)
    cos, sin = (
        np.concatenate([function(angle) for angle in angles]).astype(np.float32) * factor
        for function in (np.cos, np.sin)
    )
    device = rows.tokens.device
    return torch.from_numpy(cos).to(device), torch.from_numpy(sin).to(device)
