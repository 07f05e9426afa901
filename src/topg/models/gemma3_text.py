"""Gemma 3, text only: four norms a block, local and global layers with a rope each, a scaled embedding."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import ClassVar

from topg.models.base import Checkpoint, DecoderConfig, Source, TensorSpec
from topg.models.llama import Llama
from topg.models.qwen2 import layer_type_windows
from topg.models.qwen3 import HeadNormLlama
from topg.models.settings import (
    MAX_LAYERS,
    Settings,
    activation,
    huggingface_scaling,
    rotary_dim,
    sliding_window,
)
from topg.ops import Rope
from topg.plan import PlanBuilder

GLOBAL_THETA, LOCAL_THETA = 1_000_000.0, 10_000.0
GLOBAL_EVERY = 6  # in the published models every sixth layer is global


class Gemma3Text(HeadNormLlama):
    model_type: ClassVar[str] = "gemma3_text"
    causal_lm_class: ClassVar[str] = "Gemma3ForCausalLM"
    gguf_architecture: ClassVar[str | None] = "gemma3"
    tied_by_default: ClassVar[bool] = True
    default_context: ClassVar[int] = 131_072
    default_head_dim: ClassVar[int | None] = 256
    default_kv_heads: ClassVar[int | None] = 4

    # ---- config -----------------------------------------------------------------------------------------------

    def huggingface_config(self, settings: Settings) -> DecoderConfig:
        if settings.flag("use_bidirectional_attention", False):
            raise settings.refuse("use_bidirectional_attention", "only causal attention is supported")
        return replace(
            super().huggingface_config(settings),
            activation=activation(settings, "hidden_activation", "gelu_pytorch_tanh"),
            query_scale=settings.number("query_pre_attn_scalar", 256.0) ** -0.5,
            attention_softcap=settings.optional_number("attn_logit_softcapping"),
            logits_softcap=settings.optional_number("final_logit_softcapping"),
        )

    def huggingface_ropes(
        self, settings: Settings, head_dim: int, context: int, windows: tuple[int | None, ...]
    ) -> tuple[Rope, ...]:
        """One rope for global and one for local layers: a section per layer type, or the older flat keys."""
        sections = settings.section("rope_parameters") or Settings({}, "rope_parameters")
        local_section = sections.section("sliding_attention") or Settings({}, "rope of local layers")
        # the flat `rope_scaling` of older files was meant for the global layers alone
        flat, global_section = settings.section("rope_scaling"), sections.section("full_attention")
        if flat is not None and global_section is not None:
            raise settings.refuse("rope_scaling", "rope_parameters is given as well; keep one of them")
        global_section = flat or global_section or Settings({}, "rope_scaling")
        global_theta = global_section.number("rope_theta", settings.number("rope_theta", GLOBAL_THETA))
        local_theta = local_section.number("rope_theta", settings.number("rope_local_base_freq", LOCAL_THETA))
        if sections.unread():
            raise settings.refuse("rope_parameters", "expected a section each for full_attention and sliding_attention")
        dim = rotary_dim(head_dim, 1.0)
        global_rope = Rope(dim, global_theta, huggingface_scaling(global_section, context, None))
        local_rope = Rope(dim, local_theta, huggingface_scaling(local_section, context, None))
        return tuple(global_rope if window is None else local_rope for window in windows)

    def huggingface_windows(self, settings: Settings, layers: int) -> tuple[int | None, ...]:
        window = sliding_window(settings)
        if window is None:
            raise settings.refuse("sliding_window", "the local layers of a Gemma 3 model slide")
        every = settings.integer("sliding_window_pattern", GLOBAL_EVERY, maximum=MAX_LAYERS)
        if settings.get("layer_types") is not None:
            return layer_type_windows(settings, layers, window)
        return _periodic_windows(layers, window, every)

    def gguf_config(self, settings: Settings, checkpoint: Checkpoint) -> DecoderConfig:
        config = super().gguf_config(settings, checkpoint)
        window = settings.optional_integer("attention.sliding_window")
        if window is None:
            raise settings.refuse("attention.sliding_window", "a Gemma 3 file states the window of its local layers")
        every = settings.integer("attention.sliding_window_pattern", GLOBAL_EVERY, maximum=MAX_LAYERS)
        windows = _periodic_windows(config.layers, window, every)
        local = Rope(config.ropes[0].dim, settings.number("rope.freq_base_swa", LOCAL_THETA))
        return replace(
            config,
            activation="gelu_tanh",
            windows=windows,
            ropes=tuple(config.ropes[0] if window is None else local for window in windows),
            attention_softcap=settings.optional_number("attn_logit_softcapping"),
            logits_softcap=settings.optional_number("final_logit_softcapping"),
            query_scale=self._gguf_query_scale(settings, config),
        )

    @staticmethod
    def _gguf_query_scale(settings: Settings, config: DecoderConfig) -> float:
        """1/sqrt(head_dim), but the 27B model (62 layers) divides by hidden/heads; the file itself does not say."""
        scale = settings.optional_number("attention.scale")
        if scale is not None:
            return scale
        width = config.hidden / config.heads if config.layers == 62 else config.head_dim
        return 1.0 / math.sqrt(width)

    # ---- tensors ----------------------------------------------------------------------------------------------

    def norm_tensors(self, config: DecoderConfig, layer: int) -> list[TensorSpec]:
        hidden = config.hidden
        attention, _, query, key = super().norm_tensors(config, layer)
        return [
            attention,
            self.norm_tensor(hidden, layer, "post_attention_norm", "post_attention_layernorm", "post_attention_norm"),
            self.norm_tensor(hidden, layer, "mlp_norm", "pre_feedforward_layernorm", "ffn_norm"),
            self.norm_tensor(hidden, layer, "post_mlp_norm", "post_feedforward_layernorm", "post_ffw_norm"),
            query,
            key,
        ]

    def norm_tensor(self, width: int, layer: int | None, name: str, huggingface: str, gguf: str) -> TensorSpec:
        """The checkpoint keeps norm weights minus one; GGUF files have the one added already."""
        spec = Llama.norm_tensor(self, width, layer, name, huggingface, gguf)
        return replace(spec, huggingface=Source(spec.huggingface.name, offset=1.0))

    # ---- plan -------------------------------------------------------------------------------------------------

    def embed(self, b: PlanBuilder, config: DecoderConfig) -> str:
        return b.scale(super().embed(b, config), config.hidden**0.5, name="embed_scale", out="x")

    def block(self, b: PlanBuilder, x: str, layer: int, config: DecoderConfig) -> str:
        h = b.norm(x, "attention_norm", config.norm_eps, out="h")
        h = b.norm(self.attention(b, h, layer, config), "post_attention_norm", config.norm_eps, out="h")
        x = b.add(x, h, name="attention_residual", out="x")
        h = b.norm(x, "mlp_norm", config.norm_eps, out="h")
        h = b.norm(self.mlp(b, h, config), "post_mlp_norm", config.norm_eps, out="h")
        return b.add(x, h, name="mlp_residual", out="x")


def _periodic_windows(layers: int, window: int, every: int) -> tuple[int | None, ...]:
    """Every `every`-th layer sees everything, the others slide."""
    return tuple(None if (layer + 1) % every == 0 else window for layer in range(layers))


ARCHITECTURE = Gemma3Text()
