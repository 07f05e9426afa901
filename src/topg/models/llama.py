"""LLaMA: RMS norms, rotary grouped-query attention, gated MLP.  Parent of most other families."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

import numpy as np

from topg.errors import CheckpointError
from topg.models.base import Architecture, Checkpoint, DecoderConfig, RowIndex, Source, TensorSpec
from topg.models.settings import (
    GGUF_NEUTRAL,
    HUGGINGFACE_NEUTRAL,
    MAX_CONTEXT,
    MAX_LAYERS,
    MAX_VOCAB,
    Settings,
    activation,
    gguf_rope,
    head_width,
    huggingface_rope,
)
from topg.ops import Attention, Rope
from topg.plan import Plan, PlanBuilder
from topg.precision.recipes import Role

GGUF_ROPE_FACTORS = "rope_freqs.weight"


class Llama(Architecture):
    model_type: ClassVar[str] = "llama"
    causal_lm_class: ClassVar[str] = "LlamaForCausalLM"
    gguf_architecture: ClassVar[str | None] = "llama"
    tied_by_default: ClassVar[bool] = False
    default_context: ClassVar[int] = 2048
    default_head_dim: ClassVar[int | None] = None  # None: hidden / heads
    default_kv_heads: ClassVar[int | None] = None  # None: as many as heads

    # ---- config -----------------------------------------------------------------------------------------------

    def read_huggingface(self, checkpoint: Checkpoint) -> DecoderConfig:
        settings = Settings(checkpoint.settings, "config.json")
        config = self.huggingface_config(settings)
        check_heads(config)
        settings.refuse_unread(HUGGINGFACE_NEUTRAL)
        return replace(config, notes=settings.unread_notes())

    def huggingface_config(self, settings: Settings) -> DecoderConfig:
        """The canonical config; variants override it and read their own keys too."""
        layers = settings.integer("num_hidden_layers", maximum=MAX_LAYERS)
        hidden, heads = settings.integer("hidden_size"), settings.integer("num_attention_heads")
        head_dim = settings.optional_integer("head_dim") or self.default_head_dim or head_width(hidden, heads)
        context = settings.integer("max_position_embeddings", self.default_context, maximum=MAX_CONTEXT)
        windows = self.huggingface_windows(settings, layers)
        bias = settings.flag("attention_bias", False)
        return DecoderConfig(
            layers=layers,
            hidden=hidden,
            intermediate=settings.integer("intermediate_size"),
            heads=heads,
            kv_heads=self._huggingface_kv_heads(settings, heads),
            head_dim=head_dim,
            vocab=settings.integer("vocab_size", maximum=MAX_VOCAB),
            context=context,
            norm_eps=settings.epsilon("rms_norm_eps", 1e-6),
            activation=activation(settings, "hidden_act", "silu"),
            tied=settings.flag("tie_word_embeddings", self.tied_by_default),
            ropes=self.huggingface_ropes(settings, head_dim, context, windows),
            windows=windows,
            query_scale=head_dim**-0.5,
            qkv_bias=bias,
            attention_output_bias=bias,
            mlp_bias=settings.flag("mlp_bias", False),
        )

    def _huggingface_kv_heads(self, settings: Settings, heads: int) -> int:
        """Absent, the family's default counts; null means as many as query heads."""
        default = None if settings.is_null("num_key_value_heads") else self.default_kv_heads
        return settings.integer("num_key_value_heads", default or heads)

    def huggingface_windows(self, settings: Settings, layers: int) -> tuple[int | None, ...]:
        """The sliding window of each layer."""
        if settings.optional_integer("sliding_window") is not None:
            raise settings.refuse("sliding_window", f"a {self.model_type} model has no sliding window")
        return (None,) * layers

    def huggingface_ropes(
        self, settings: Settings, head_dim: int, context: int, windows: tuple[int | None, ...]
    ) -> tuple[Rope, ...]:
        """The rope of each layer."""
        return (huggingface_rope(settings, head_dim, context),) * len(windows)

    def read_gguf(self, checkpoint: Checkpoint) -> DecoderConfig:
        settings = Settings(checkpoint.settings, "GGUF metadata")
        config = self.gguf_config(settings, checkpoint)
        check_heads(config)
        settings.refuse_unread(GGUF_NEUTRAL)
        return replace(config, notes=settings.unread_notes())

    def gguf_config(self, settings: Settings, checkpoint: Checkpoint) -> DecoderConfig:
        """The canonical config; variants override it."""
        layers = settings.integer("block_count", maximum=MAX_LAYERS)
        hidden, heads = settings.integer("embedding_length"), settings.integer("attention.head_count")
        head_dim = settings.optional_integer("attention.key_length") or head_width(hidden, heads)
        if settings.integer("attention.value_length", head_dim) != head_dim:
            raise settings.refuse("attention.value_length", f"keys are {head_dim} wide and values must be as well")
        context = settings.integer("context_length", maximum=MAX_CONTEXT)
        names = checkpoint.tensor_names
        factors = checkpoint.vector(GGUF_ROPE_FACTORS) if GGUF_ROPE_FACTORS in names else None
        rope = gguf_rope(settings, head_dim, factors, context=context)
        return DecoderConfig(
            layers=layers,
            hidden=hidden,
            intermediate=settings.integer("feed_forward_length"),
            heads=heads,
            kv_heads=settings.integer("attention.head_count_kv", heads),
            head_dim=head_dim,
            vocab=gguf_vocab(settings),
            context=context,
            norm_eps=settings.epsilon("attention.layer_norm_rms_epsilon"),
            activation="silu",
            tied="output.weight" not in names,
            ropes=(rope,) * layers,
            windows=(settings.optional_integer("attention.sliding_window"),) * layers,
            query_scale=settings.optional_number("attention.scale") or head_dim**-0.5,
            qkv_bias="blk.0.attn_q.bias" in names,
            attention_output_bias="blk.0.attn_output.bias" in names,
            mlp_bias="blk.0.ffn_up.bias" in names,
        )

    # ---- tensors ----------------------------------------------------------------------------------------------

    def tensors(self, config: DecoderConfig) -> tuple[TensorSpec, ...]:
        table = [
            TensorSpec(
                "embed.weight", "embedding", (config.vocab, config.hidden), None,
                Source("model.embed_tokens.weight"), Source("token_embd.weight"),
            )
        ]  # fmt: skip
        for layer in range(config.layers):
            table += self.layer_tensors(config, layer)
        table.append(self.norm_tensor(config.hidden, None, "norm", "model.norm", "output_norm"))
        if not config.tied:
            table.append(
                TensorSpec(
                    "head.weight", "head", (config.vocab, config.hidden), None,
                    Source("lm_head.weight"), Source("output.weight"),
                )
            )  # fmt: skip
        return tuple(table)

    def layer_tensors(self, config: DecoderConfig, layer: int) -> list[TensorSpec]:
        """Tensors of one block; variants add theirs."""
        hidden, query, kv = config.hidden, config.heads * config.head_dim, config.kv_heads * config.head_dim
        rotary = config.ropes[layer].dim
        query_rows = self.gguf_rows(config.heads, config.head_dim, rotary)
        key_rows = self.gguf_rows(config.kv_heads, config.head_dim, rotary)
        linear = _LinearTable(layer)
        return [
            *self.norm_tensors(config, layer),
            *linear("attention.query", "query", (query, hidden), "self_attn.q_proj", "attn_q", config.qkv_bias,
                    query_rows),
            *linear("attention.key", "key", (kv, hidden), "self_attn.k_proj", "attn_k", config.qkv_bias, key_rows),
            *linear("attention.value", "value", (kv, hidden), "self_attn.v_proj", "attn_v", config.qkv_bias),
            *linear("attention.output", "attention_output", (hidden, query), "self_attn.o_proj", "attn_output",
                    config.attention_output_bias),
            *linear("mlp.gate", "gate", (config.intermediate, hidden), "mlp.gate_proj", "ffn_gate", config.mlp_bias),
            *linear("mlp.up", "up", (config.intermediate, hidden), "mlp.up_proj", "ffn_up", config.mlp_bias),
            *linear("mlp.down", "down", (hidden, config.intermediate), "mlp.down_proj", "ffn_down", config.mlp_bias),
        ]  # fmt: skip

    def norm_tensors(self, config: DecoderConfig, layer: int) -> list[TensorSpec]:
        """Norm weights of one block."""
        return [
            self.norm_tensor(config.hidden, layer, "attention_norm", "input_layernorm", "attn_norm"),
            self.norm_tensor(config.hidden, layer, "mlp_norm", "post_attention_layernorm", "ffn_norm"),
        ]

    def norm_tensor(self, width: int, layer: int | None, name: str, huggingface: str, gguf: str) -> TensorSpec:
        """One norm weight; variants that store it differently override this."""
        if layer is None:
            return TensorSpec(f"{name}.weight", "norm", (width,), None, Source(f"{huggingface}.weight"),
                              Source(f"{gguf}.weight"))  # fmt: skip
        return TensorSpec(
            f"layers.{layer}.{name}.weight", "norm", (width,), layer,
            Source(f"model.layers.{layer}.{huggingface}.weight"), Source(f"blk.{layer}.{gguf}.weight"),
        )  # fmt: skip

    def gguf_rows(self, heads: int, head_dim: int, rotary: int) -> RowIndex | None:
        """Row order of query and key in a GGUF: it keeps the two values of a rotary pair side by side."""
        return interleaved_rows(heads, head_dim, rotary)

    # ---- plan -------------------------------------------------------------------------------------------------

    def plan(self, config: DecoderConfig) -> Plan:
        b = PlanBuilder()
        x = self.embed(b, config)
        for layer in range(config.layers):
            with b.scope(f"layers.{layer}"):
                x = self.block(b, x, layer, config)
        x = b.norm(b.select_rows(x), "norm", config.norm_eps, out="selected")
        b.logits(x, "embed" if config.tied else "head", config.vocab, softcap=config.logits_softcap)
        return b.build()

    def embed(self, b: PlanBuilder, config: DecoderConfig) -> str:
        return b.embed("embed", config.vocab, config.hidden)

    def block(self, b: PlanBuilder, x: str, layer: int, config: DecoderConfig) -> str:
        h = b.norm(x, "attention_norm", config.norm_eps, out="h")
        x = b.add(x, self.attention(b, h, layer, config), name="attention_residual", out="x")
        h = b.norm(x, "mlp_norm", config.norm_eps, out="h")
        return b.add(x, self.mlp(b, h, config), name="mlp_residual", out="x")

    def attention(self, b: PlanBuilder, h: str, layer: int, config: DecoderConfig) -> str:
        with b.scope("attention"):
            query, key, value = self.project(b, h, config)
            attended = b.append(
                Attention(
                    b.path("attend"), "attended", query, key, value, layer,
                    config.heads, config.kv_heads, config.head_dim, config.query_scale,
                    config.ropes[layer], config.windows[layer], config.attention_softcap,
                )
            )  # fmt: skip
            return b.linear(attended, "output", config.hidden, bias=config.attention_output_bias, out="h")

    def project(self, b: PlanBuilder, h: str, config: DecoderConfig) -> tuple[str, str, str]:
        """Query, key and value before rotation."""
        query, kv = config.heads * config.head_dim, config.kv_heads * config.head_dim
        return (
            b.linear(h, "query", query, bias=config.qkv_bias, out="query"),
            b.linear(h, "key", kv, bias=config.qkv_bias, out="key"),
            b.linear(h, "value", kv, bias=config.qkv_bias, out="value"),
        )

    def mlp(self, b: PlanBuilder, h: str, config: DecoderConfig) -> str:
        with b.scope("mlp"):
            gate = b.linear(h, "gate", config.intermediate, bias=config.mlp_bias, out="gate")
            up = b.linear(h, "up", config.intermediate, bias=config.mlp_bias, out="up")
            gated = b.gate(gate, up, config.activation, out="gate")
            return b.linear(gated, "down", config.hidden, bias=config.mlp_bias, out="h")


class _LinearTable:
    """Specs of one layer's linears: the weight, and the bias where there is one."""

    def __init__(self, layer: int) -> None:
        self._layer = layer

    def __call__(self, name: str, role: Role, shape: tuple[int, int], huggingface: str, gguf: str, bias: bool,
                 gguf_rows: RowIndex | None = None) -> list[TensorSpec]:  # fmt: skip
        return [
            TensorSpec(
                f"layers.{self._layer}.{name}.{kind}", part_role, part_shape, self._layer,
                Source(f"model.layers.{self._layer}.{huggingface}.{kind}"),
                Source(f"blk.{self._layer}.{gguf}.{kind}", gguf_rows),
            )
            for kind, part_role, part_shape in _parts(role, shape, bias)
        ]  # fmt: skip


def _parts(role: Role, shape: tuple[int, int], bias: bool) -> list[tuple[str, Role, tuple[int, ...]]]:
    parts: list[tuple[str, Role, tuple[int, ...]]] = [("weight", role, shape)]
    return [*parts, ("bias", "bias", shape[:1])] if bias else parts


def interleaved_rows(heads: int, head_dim: int, rotary: int) -> RowIndex:
    """Stored row of each row when the rotary pair (i, i + rotary/2) is stored as (2i, 2i + 1)."""
    head = np.arange(head_dim, dtype=np.int64)
    head[:rotary] = np.arange(rotary, dtype=np.int64).reshape(rotary // 2, 2).T.reshape(-1)
    rows: RowIndex = (np.arange(heads, dtype=np.int64)[:, None] * head_dim + head).reshape(-1)
    return rows


def gguf_vocab(settings: Settings) -> int:
    """Rows of the embedding; older files say it only by their token list."""
    tokens = settings.get("tokenizer.ggml.tokens")
    return settings.integer("vocab_size", len(tokens) if isinstance(tokens, list) else None, maximum=MAX_VOCAB)


def check_heads(config: DecoderConfig) -> None:
    """Raise CheckpointError when the heads cannot share their key/value heads."""
    if config.heads % config.kv_heads:
        raise CheckpointError(
            f"{config.heads} attention heads cannot share {config.kv_heads} key/value heads; the first must be a "
            "multiple of the second"
        )


ARCHITECTURE = Llama()
