"""Qwen3: LLaMA with an RMS norm on each query and key head."""

from __future__ import annotations

from typing import ClassVar

from topg.models.base import DecoderConfig, TensorSpec
from topg.models.llama import Llama
from topg.models.qwen2 import qwen_windows
from topg.models.settings import Settings
from topg.plan import PlanBuilder


class HeadNormLlama(Llama):
    """LLaMA whose query and key heads are normalised before they are rotated."""

    def norm_tensors(self, config: DecoderConfig, layer: int) -> list[TensorSpec]:
        return [
            *super().norm_tensors(config, layer),
            self.norm_tensor(config.head_dim, layer, "attention.query_norm", "self_attn.q_norm", "attn_q_norm"),
            self.norm_tensor(config.head_dim, layer, "attention.key_norm", "self_attn.k_norm", "attn_k_norm"),
        ]

    def project(self, b: PlanBuilder, h: str, config: DecoderConfig) -> tuple[str, str, str]:
        query, key, value = super().project(b, h, config)
        return (
            b.norm(query, "query_norm", config.norm_eps, runs=config.heads, out="query"),
            b.norm(key, "key_norm", config.norm_eps, runs=config.kv_heads, out="key"),
            value,
        )

    def gguf_rows(self, heads: int, head_dim: int, rotary: int) -> None:
        """GGUF files of these families keep the order of the checkpoint."""
        return None


class Qwen3(HeadNormLlama):
    model_type: ClassVar[str] = "qwen3"
    causal_lm_class: ClassVar[str] = "Qwen3ForCausalLM"
    gguf_architecture: ClassVar[str | None] = "qwen3"
    default_context: ClassVar[int] = 32768
    default_kv_heads: ClassVar[int | None] = 32
    default_head_dim: ClassVar[int | None] = 128

    def huggingface_windows(self, settings: Settings, layers: int) -> tuple[int | None, ...]:
        return qwen_windows(settings, layers)


ARCHITECTURE = Qwen3()
