"""Qwen2 and 2.5: LLaMA with biases on query, key and value, and a window in the upper layers where switched on."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from topg.models.base import DecoderConfig
from topg.models.llama import Llama
from topg.models.settings import MAX_LAYERS, Settings, sliding_window


class Qwen2(Llama):
    model_type: ClassVar[str] = "qwen2"
    causal_lm_class: ClassVar[str] = "Qwen2ForCausalLM"
    gguf_architecture: ClassVar[str | None] = "qwen2"
    default_context: ClassVar[int] = 32768
    default_kv_heads: ClassVar[int | None] = 32

    def huggingface_config(self, settings: Settings) -> DecoderConfig:
        return replace(super().huggingface_config(settings), qkv_bias=True, attention_output_bias=False)

    def huggingface_windows(self, settings: Settings, layers: int) -> tuple[int | None, ...]:
        return qwen_windows(settings, layers)

    def gguf_rows(self, heads: int, head_dim: int, rotary: int) -> None:
        """Its GGUF files keep the order of the checkpoint."""
        return None


def qwen_windows(settings: Settings, layers: int) -> tuple[int | None, ...]:
    """Layers from `max_window_layers` on slide, or those that `layer_types` names, if `use_sliding_window` is set."""
    window = sliding_window(settings)
    first = settings.integer("max_window_layers", 28, minimum=0, maximum=MAX_LAYERS)
    kinds = settings.get("layer_types")
    if not settings.flag("use_sliding_window", False):
        window = None
    if kinds is not None:
        return layer_type_windows(settings, layers, window)
    return tuple(window if layer >= first else None for layer in range(layers))


def layer_type_windows(settings: Settings, layers: int, window: int | None) -> tuple[int | None, ...]:
    """Windows from a `layer_types` list; raises when it does not fit or names an unknown kind."""
    kinds = settings.get("layer_types")
    known = {"full_attention": None, "sliding_attention": window}
    if not isinstance(kinds, list) or len(kinds) != layers or any(kind not in known for kind in map(str, kinds)):
        raise settings.refuse("layer_types", f"expected {layers} entries, each one of {', '.join(known)}")
    if window is None and "sliding_attention" in kinds:
        raise settings.refuse("layer_types", "it names sliding layers, but no sliding_window is in effect")
    return tuple(known[kind] for kind in kinds)


ARCHITECTURE = Qwen2()
