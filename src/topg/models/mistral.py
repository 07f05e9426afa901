"""Mistral: LLaMA with a sliding window in every layer."""

from __future__ import annotations

from typing import ClassVar

from topg.models.llama import Llama
from topg.models.settings import Settings


class Mistral(Llama):
    model_type: ClassVar[str] = "mistral"
    causal_lm_class: ClassVar[str] = "MistralForCausalLM"
    gguf_architecture: ClassVar[str | None] = None  # its GGUF files call themselves llama
    default_context: ClassVar[int] = 4096 * 32

    def huggingface_windows(self, settings: Settings, layers: int) -> tuple[int | None, ...]:
        window = settings.optional_integer("sliding_window")
        return (window,) * layers


ARCHITECTURE = Mistral()
