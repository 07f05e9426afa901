"""Tiny random models made and run by transformers: the independent reference of the parity tests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM

VOCAB = 320  # what support.tokenizers' byte-level tokenizer needs, plus rows no token uses

SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 2048,
    "bos_token_id": None,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
NEOX_SHAPE = {key: value for key, value in SHAPE.items() if key not in ("num_key_value_heads", "head_dim")}


def rope(kind: str, **settings: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **settings}}


LLAMA3 = rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64)
YARN = rope("yarn", factor=4.0, original_max_position_embeddings=64)
YARN_MSCALE = rope("yarn", factor=4.0, original_max_position_embeddings=64, beta_fast=16.0, beta_slow=2.0,
                   mscale=1.0, mscale_all_dim=0.5)  # fmt: skip
GEMMA = {**SHAPE, "num_hidden_layers": 4, "head_dim": 32, "query_pre_attn_scalar": 16, "sliding_window": 16,
         "tie_word_embeddings": True,
         "layer_types": ["sliding_attention", "full_attention"] * 2}  # fmt: skip
GEMMA_SCALED = {
    "rope_parameters": {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1_000_000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    }
}

MODELS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", **SHAPE},
    "llama-biases": {"model_type": "llama", **SHAPE, "attention_bias": True, "mlp_bias": True},
    "llama-wide-heads": {"model_type": "llama", **SHAPE, "head_dim": 32},
    "llama-narrow": {"model_type": "llama", **SHAPE, "hidden_size": 48, "head_dim": 16, "num_key_value_heads": 1},
    "llama-tied": {"model_type": "llama", **SHAPE, "tie_word_embeddings": True},
    "llama-rope-linear": {"model_type": "llama", **SHAPE, **rope("linear", factor=4.0)},
    "llama-rope-llama3": {"model_type": "llama", **SHAPE, **LLAMA3},
    "llama-rope-yarn": {"model_type": "llama", **SHAPE, **YARN},
    "llama-rope-yarn-mscale": {"model_type": "llama", **SHAPE, **YARN_MSCALE},
    "llama-rope-dynamic": {"model_type": "llama", **SHAPE, **rope("dynamic", factor=2.0)},
    "mistral": {"model_type": "mistral", **SHAPE, "sliding_window": 16},
    "mistral-full": {"model_type": "mistral", **SHAPE, "sliding_window": None},
    "qwen2": {"model_type": "qwen2", **SHAPE},
    "qwen2-window": {"model_type": "qwen2", **SHAPE, "use_sliding_window": True, "sliding_window": 16,
                     "max_window_layers": 1},
    "qwen3": {"model_type": "qwen3", **SHAPE, "head_dim": 32},
    "gemma3": {"model_type": "gemma3_text", **GEMMA},
    "gemma3-softcap": {"model_type": "gemma3_text", **GEMMA, **GEMMA_SCALED, "final_logit_softcapping": 30.0},
    "neox-parallel": {"model_type": "gpt_neox", **NEOX_SHAPE, "use_parallel_residual": True},
    "neox-sequential": {"model_type": "gpt_neox", **NEOX_SHAPE, "use_parallel_residual": False},
    "neox-rotary-half": {"model_type": "gpt_neox", **NEOX_SHAPE, "rotary_pct": 0.5},
    "neox-rotary-full": {"model_type": "gpt_neox", **NEOX_SHAPE, "rotary_pct": 1.0},
}  # fmt: skip


def make_model(config: dict[str, Any], seed: int = 0) -> Any:
    """A float32 transformers model whose logits depend on its whole context."""
    settings = dict(config)
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(settings.pop("model_type"), **settings), attn_implementation="eager"
    )
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(_scaled_noise(name, noise))
    return model.float().eval()


def _scaled_noise(name: str, noise: torch.Tensor) -> torch.Tensor:
    if "norm" in name and name.endswith("weight"):
        return 1.0 + 0.1 * noise
    if name.endswith("bias"):
        return 0.3 * noise
    if "embed" in name:
        return noise
    return noise * 1.3 / noise.shape[-1] ** 0.5


def save_checkpoint(config: dict[str, Any], folder: Path, tokenizer_json: str, seed: int = 0) -> Any:
    """Write config, safetensors and tokenizer; returns the model it holds."""
    model = make_model(config, seed)
    model.save_pretrained(folder)
    (folder / "tokenizer.json").write_text(tokenizer_json, encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>"}), encoding="utf-8")
    return model


@torch.no_grad()
def reference_logits(model: Any, ids: list[int]) -> np.ndarray:
    """Logits [len(ids), vocab] of one uncached forward pass."""
    return model(input_ids=torch.tensor([ids]), use_cache=False).logits[0].float().numpy()


@torch.no_grad()
def reference_logits_token_by_token(model: Any, ids: list[int]) -> np.ndarray:
    """The same, one token at a time through transformers' own cache."""
    cache, rows = None, []
    for token in ids:
        result = model(input_ids=torch.tensor([[token]]), past_key_values=cache, use_cache=True)
        cache = result.past_key_values
        rows.append(result.logits[0, -1].float().numpy())
    return np.stack(rows)
