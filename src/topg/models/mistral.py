"""Mistral: LLaMA with a sliding window in every layer."""

from __future__ import annotations

from typing import ClassVar

from topg.models.llama import Llama
from topg.models.settings import Settings, sliding_window


class Mistral(Llama):
    model_type: ClassVar[str] = "mistral"
    causal_lm_class: ClassVar[str] = "MistralForCausalLM"
    gguf_architecture: ClassVar[str | None] = None  # its GGUF files call themselves llama
    default_context: ClassVar[int] = 4096 * 32
    default_kv_heads: ClassVar[int | None] = 8

    def huggingface_windows(self, settings: Settings, layers: int) -> tuple[int | None, ...]:
        window = sliding_window(settings)
        kinds = settings.get("layer_types")
        expected = "full_attention" if window is None else "sliding_attention"
        if kinds is not None and kinds != [expected] * layers:
            raise settings.refuse("layer_types", f"with this sliding_window all {layers} layers are {expected}")
        return (window,) * layers


ARCHITECTURE = Mistral()
