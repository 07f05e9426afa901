"""GPT-NeoX (Pythia): layer norms with bias, partial rotary, fused QKV, parallel or sequential residual."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from topg.models.base import Architecture, Checkpoint, DecoderConfig, RowIndex, Source, TensorSpec
from topg.models.llama import gguf_vocab
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
from topg.ops import Attention
from topg.plan import Plan, PlanBuilder
from topg.precision.recipes import Role

HEAD_NAMES = ("embed_out.weight", "lm_head.weight")  # older and newer checkpoints


@dataclass(frozen=True)
class GptNeoxConfig(DecoderConfig):
    """With the family's own choice of residual, and the name its checkpoint gives the head."""

    parallel_residual: bool = True
    head_name: str = HEAD_NAMES[0]


class GptNeox(Architecture):
    model_type: ClassVar[str] = "gpt_neox"
    causal_lm_class: ClassVar[str] = "GPTNeoXForCausalLM"
    gguf_architecture: ClassVar[str | None] = "gptneox"

    # ---- config -----------------------------------------------------------------------------------------------

    def read_huggingface(self, checkpoint: Checkpoint) -> GptNeoxConfig:
        settings = Settings(checkpoint.settings, "config.json")
        layers = settings.integer("num_hidden_layers", maximum=MAX_LAYERS)
        hidden, heads = settings.integer("hidden_size"), settings.integer("num_attention_heads")
        head_dim = head_width(hidden, heads)
        context = settings.integer("max_position_embeddings", 2048, maximum=MAX_CONTEXT)
        share = settings.number("rotary_pct", 0.25)
        rope = huggingface_rope(settings, head_dim, context, rotary_share=share, theta_key="rotary_emb_base")
        bias = settings.flag("attention_bias", True)
        config = GptNeoxConfig(
            layers=layers,
            hidden=hidden,
            intermediate=settings.integer("intermediate_size"),
            heads=heads,
            kv_heads=heads,
            head_dim=head_dim,
            vocab=settings.integer("vocab_size", maximum=MAX_VOCAB),
            context=context,
            norm_eps=settings.epsilon("layer_norm_eps", 1e-5),
            activation=activation(settings, "hidden_act", "gelu"),
            tied=settings.flag("tie_word_embeddings", False),
            ropes=(rope,) * layers,
            windows=(None,) * layers,
            query_scale=head_dim**-0.5,
            qkv_bias=bias,
            attention_output_bias=bias,
            mlp_bias=True,
            parallel_residual=settings.flag("use_parallel_residual", True),
            head_name=next((name for name in HEAD_NAMES if name in checkpoint.tensor_names), HEAD_NAMES[0]),
        )
        settings.refuse_unread(HUGGINGFACE_NEUTRAL)
        return replace(config, notes=settings.unread_notes())

    def read_gguf(self, checkpoint: Checkpoint) -> GptNeoxConfig:
        settings = Settings(checkpoint.settings, "GGUF metadata")
        layers = settings.integer("block_count", maximum=MAX_LAYERS)
        hidden, heads = settings.integer("embedding_length"), settings.integer("attention.head_count")
        head_dim = head_width(hidden, heads)
        context = settings.integer("context_length", maximum=MAX_CONTEXT)
        config = GptNeoxConfig(
            layers=layers,
            hidden=hidden,
            intermediate=settings.integer("feed_forward_length"),
            heads=heads,
            kv_heads=heads,
            head_dim=head_dim,
            vocab=gguf_vocab(settings),
            context=context,
            norm_eps=settings.epsilon("attention.layer_norm_epsilon"),
            activation="gelu",
            tied="output.weight" not in checkpoint.tensor_names,
            ropes=(gguf_rope(settings, head_dim, context=context),) * layers,
            windows=(None,) * layers,
            query_scale=head_dim**-0.5,
            qkv_bias="blk.0.attn_qkv.bias" in checkpoint.tensor_names,
            attention_output_bias="blk.0.attn_output.bias" in checkpoint.tensor_names,
            mlp_bias=True,
            parallel_residual=settings.flag("use_parallel_residual", True),
        )
        settings.refuse_unread(GGUF_NEUTRAL)
        return replace(config, notes=settings.unread_notes())

    # ---- tensors ----------------------------------------------------------------------------------------------

    def tensors(self, config: DecoderConfig) -> tuple[TensorSpec, ...]:
        config = _own(config)
        table = [_single("embed.weight", "embedding", (config.vocab, config.hidden), "gpt_neox.embed_in.weight",
                         "token_embd.weight")]  # fmt: skip
        for layer in range(config.layers):
            table += self._layer_tensors(config, layer)
        for kind, role in _NORM_PARTS:
            table.append(_single(f"norm.{kind}", role, (config.hidden,), f"gpt_neox.final_layer_norm.{kind}",
                                 f"output_norm.{kind}"))  # fmt: skip
        if not config.tied:
            table.append(_single("head.weight", "head", (config.vocab, config.hidden), config.head_name,
                                 "output.weight"))  # fmt: skip
        return tuple(table)

    def _layer_tensors(self, config: GptNeoxConfig, layer: int) -> list[TensorSpec]:
        hidden, intermediate = config.hidden, config.intermediate
        table: list[TensorSpec] = []
        for name, huggingface, gguf in (
            ("attention_norm", "input_layernorm", "attn_norm"),
            ("mlp_norm", "post_attention_layernorm", "ffn_norm"),
        ):
            table += [_layer_spec(layer, name, kind, role, (hidden,), huggingface, gguf) for kind, role in _NORM_PARTS]
        table += _fused_qkv(config, layer)
        linears: tuple[tuple[str, Role, tuple[int, int], str, str, bool], ...] = (
            ("attention.output", "attention_output", (hidden, hidden), "attention.dense", "attn_output",
             config.attention_output_bias),
            ("mlp.up", "up", (intermediate, hidden), "mlp.dense_h_to_4h", "ffn_up", True),
            ("mlp.down", "down", (hidden, intermediate), "mlp.dense_4h_to_h", "ffn_down", True),
        )  # fmt: skip
        for name, role, shape, huggingface, gguf, bias in linears:
            table.append(_layer_spec(layer, name, "weight", role, shape, huggingface, gguf))
            if bias:
                table.append(_layer_spec(layer, name, "bias", "bias", shape[:1], huggingface, gguf))
        return table

    # ---- plan -------------------------------------------------------------------------------------------------

    def plan(self, config: DecoderConfig) -> Plan:
        config = _own(config)
        b = PlanBuilder()
        x = b.embed("embed", config.vocab, config.hidden)
        for layer in range(config.layers):
            with b.scope(f"layers.{layer}"):
                x = self._block(b, x, layer, config)
        x = b.norm(b.select_rows(x), "norm", config.norm_eps, kind="layer", bias=True, out="selected")
        b.logits(x, "embed" if config.tied else "head", config.vocab)
        return b.build()

    def _block(self, b: PlanBuilder, x: str, layer: int, config: GptNeoxConfig) -> str:
        """Parallel: both branches read x.  Sequential: the MLP reads x plus attention."""
        h = b.norm(x, "attention_norm", config.norm_eps, kind="layer", bias=True, out="h")
        if config.parallel_residual:
            attention = self._attention(b, h, layer, config)
            h = b.norm(x, "mlp_norm", config.norm_eps, kind="layer", bias=True, out="h")
            branches = b.add(self._mlp(b, h, config), attention, name="branches", out="h")
            return b.add(branches, x, name="residual", out="x")
        x = b.add(self._attention(b, h, layer, config), x, name="attention_residual", out="x")
        h = b.norm(x, "mlp_norm", config.norm_eps, kind="layer", bias=True, out="h")
        return b.add(self._mlp(b, h, config), x, name="mlp_residual", out="x")

    def _attention(self, b: PlanBuilder, h: str, layer: int, config: GptNeoxConfig) -> str:
        with b.scope("attention"):
            query, key, value = (
                b.linear(h, name, config.hidden, bias=config.qkv_bias, out=name) for name in ("query", "key", "value")
            )
            attended = b.append(
                Attention(
                    b.path("attend"), "attended", query, key, value, layer,
                    config.heads, config.kv_heads, config.head_dim, config.query_scale, config.ropes[layer],
                )
            )  # fmt: skip
            return b.linear(attended, "output", config.hidden, bias=config.attention_output_bias, out="attention")

    def _mlp(self, b: PlanBuilder, h: str, config: GptNeoxConfig) -> str:
        with b.scope("mlp"):
            up = b.linear(h, "up", config.intermediate, bias=True, out="up")
            return b.linear(b.activation(up, config.activation, out="up"), "down", config.hidden, bias=True, out="h")


_NORM_PARTS: tuple[tuple[str, Role], ...] = (("weight", "norm"), ("bias", "bias"))


def _own(config: DecoderConfig) -> GptNeoxConfig:
    assert isinstance(config, GptNeoxConfig), "a config read by this architecture"
    return config


def _single(name: str, role: Role, shape: tuple[int, ...], huggingface: str, gguf: str) -> TensorSpec:
    return TensorSpec(name, role, shape, None, Source(huggingface), Source(gguf))


def _layer_spec(layer: int, name: str, kind: str, role: Role, shape: tuple[int, ...], huggingface: str,
                gguf: str) -> TensorSpec:  # fmt: skip
    return TensorSpec(
        f"layers.{layer}.{name}.{kind}", role, shape, layer,
        Source(f"gpt_neox.layers.{layer}.{huggingface}.{kind}"), Source(f"blk.{layer}.{gguf}.{kind}"),
    )  # fmt: skip


def _fused_qkv(config: GptNeoxConfig, layer: int) -> list[TensorSpec]:
    """Query, key and value out of one stored tensor.

    The checkpoint keeps [head][query, key, value][head_dim] rows, a GGUF [query, key, value][head][head_dim].
    """
    hidden, stored = config.hidden, 3 * config.hidden
    by_head = np.arange(stored, dtype=np.int64).reshape(config.heads, 3, config.head_dim)
    stacked: RowIndex = np.arange(stored, dtype=np.int64).reshape(3, hidden)
    roles: tuple[Role, ...] = ("query", "key", "value")
    table = []
    for index, role in enumerate(roles):
        for kind, shape in (("weight", (hidden, hidden)), ("bias", (hidden,))):
            if kind == "bias" and not config.qkv_bias:
                continue
            huggingface = Source(f"gpt_neox.layers.{layer}.attention.query_key_value.{kind}",
                                 by_head[:, index].reshape(-1), stored)  # fmt: skip
            gguf = Source(f"blk.{layer}.attn_qkv.{kind}", stacked[index], stored)
            part_role: Role = role if kind == "weight" else "bias"
            table.append(TensorSpec(f"layers.{layer}.attention.{role}.{kind}", part_role, shape, layer,
                                    huggingface, gguf))  # fmt: skip
    return table


ARCHITECTURE = GptNeox()
