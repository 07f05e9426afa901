"""A model in memory with the interface of a converted folder, and small random models for tests of back ends."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from topg.ops import Attention, Rope
from topg.plan import Plan, PlanBuilder
from topg.precision.formats import FLOAT32, Precision
from topg.precision.gguf_blocks import kept_precision
from topg.precision.quantise import dequantise, quantise
from topg.precision.recipes import Recipe, Role, recipe

FloatArray = npt.NDArray[np.float32]

_ROLES: Mapping[str, Role] = {
    "embed_tokens": "embedding",
    "lm_head": "head",
    "q_proj": "query",
    "k_proj": "key",
    "v_proj": "value",
    "o_proj": "attention_output",
    "gate_proj": "gate",
    "up_proj": "up",
    "down_proj": "down",
}


class MemoryModel:
    """Tensors quantised on construction; `precisions` names the precision of each, float32 where it names none."""

    def __init__(
        self, plan: Plan, tensors: Mapping[str, FloatArray], precisions: Mapping[str, Precision] | None = None
    ) -> None:
        self.plan = plan
        self._shapes = {name: values.shape for name, values in tensors.items()}
        self._precisions = {name: (precisions or {}).get(name, FLOAT32) for name in tensors}
        self._parts = {name: quantise(values, self._precisions[name]) for name, values in tensors.items()}

    def precision(self, tensor: str) -> Precision:
        return self._precisions[tensor]

    def shape(self, tensor: str) -> tuple[int, ...]:
        return self._shapes[tensor]

    def part(self, tensor: str, part_name: str) -> npt.NDArray[Any]:
        return self._parts[tensor][part_name]

    def release_memory(self) -> None:
        """Nothing is mapped."""

    def dequantised(self, tensor: str) -> FloatArray:
        """The float32 values that the stored parts stand for."""
        return dequantise(self._parts[tensor], self._precisions[tensor], self._shapes[tensor])


@dataclass(frozen=True)
class Dimensions:
    """A small decoder with every feature the ops offer: GQA, q/k norms, biases, a window, soft caps, partial rotary."""

    layers: int = 2
    hidden: int = 64
    intermediate: int = 176
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    vocab: int = 99
    plain: bool = False


def random_model(recipe_name: str, dimensions: Dimensions = Dimensions(), seed: int = 0) -> MemoryModel:
    """A decoder with random weights in the precisions of a recipe."""
    return _random_model(recipe(recipe_name), dimensions, seed)


def kept_model(ggml_type: str) -> MemoryModel:
    """A decoder with random matrices stored as a GGUF's tensors of this type are kept."""
    precision = kept_precision(ggml_type)
    assert precision is not None
    return _random_model(Recipe(ggml_type, precision, {}), Dimensions(), 0)


def _random_model(chosen: Recipe, dimensions: Dimensions, seed: int) -> MemoryModel:
    plan = decoder_plan(dimensions)
    rng = np.random.default_rng(seed)
    tensors = {name: _random(rng, shape) for op in plan.ops for name, shape in op.tensor_shapes().items()}
    return MemoryModel(plan, tensors, {name: chosen.precision(_role(name)) for name in tensors})


def decoder_plan(size: Dimensions) -> Plan:
    """Layers alternate between full attention and a window of 40 tokens, unless the decoder is to be plain."""
    build = PlanBuilder()
    x = build.embed("embed_tokens", size.vocab, size.hidden)
    for layer in range(size.layers):
        with build.scope(f"layers.{layer}"):
            x = _attention_block(build, x, layer, size)
            x = _mlp_block(build, x, size)
    x = build.norm(build.select_rows(x), "norm", 1e-5, out="x")
    build.logits(x, "lm_head", size.vocab, softcap=None if size.plain else 30.0)
    return build.build()


def _attention_block(build: PlanBuilder, x: str, layer: int, size: Dimensions) -> str:
    odd = layer % 2 == 1 and not size.plain
    normed = build.norm(x, "input_norm", 1e-5, out="normed")
    q = build.linear(normed, "q_proj", size.heads * size.head_dim, bias=not size.plain, out="q")
    k = build.linear(normed, "k_proj", size.kv_heads * size.head_dim, out="k")
    v = build.linear(normed, "v_proj", size.kv_heads * size.head_dim, out="v")
    if not size.plain:
        q = build.norm(q, "q_norm", 1e-6, runs=size.heads, out="q")
        k = build.norm(k, "k_norm", 1e-6, kind="layer", bias=True, runs=size.kv_heads, out="k")
    attended = build.append(
        Attention(
            build.path("attention"), "attended", q, k, v, layer, size.heads, size.kv_heads, size.head_dim,
            scale=size.head_dim**-0.5, rope=Rope(size.head_dim // 2 if odd else size.head_dim, 10000.0),
            window=40 if odd else None, softcap=20.0 if odd else None,
        )
    )  # fmt: skip
    return build.add(x, build.linear(attended, "o_proj", size.hidden, out="projected"), out="x")


def _mlp_block(build: PlanBuilder, x: str, size: Dimensions) -> str:
    normed = build.norm(x, "mlp_norm", 1e-5, out="normed")
    gate = build.linear(normed, "gate_proj", size.intermediate, out="gate")
    up = build.linear(normed, "up_proj", size.intermediate, out="up")
    gated = build.gate(gate, up, "silu" if size.plain else "gelu_tanh", out="gated")
    down = build.linear(gated, "down_proj", size.hidden, out="down")
    return build.add(x, down, name="residual_mlp", out="x")


def _role(tensor: str) -> Role:
    if tensor.endswith(".bias"):
        return "bias"
    return next((role for part, role in _ROLES.items() if part in tensor), "norm")


def _random(rng: np.random.Generator, shape: tuple[int, ...]) -> FloatArray:
    values: FloatArray = rng.standard_normal(shape, np.float32)
    centre, spread = (1, 0.2) if len(shape) == 1 else (0, shape[1] ** -0.5)
    return (centre + spread * values).astype(np.float32)
