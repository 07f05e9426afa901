"""GGUF files of every family, made from Hugging Face weights as llama.cpp's converter stores them.

Tensor names, metadata keys and writing are the official `gguf` package's; what the converter does to values is here:
LLaMA's interleaved query and key rows, GPT-NeoX's query, key and value stacked, Gemma's norms with one added.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from support.checkpoints import Floats, add_gguf_sizes, add_tokenizer

ARCHITECTURES: Mapping[str, tuple[str, gguf.MODEL_ARCH]] = {
    "llama": ("llama", gguf.MODEL_ARCH.LLAMA),
    "mistral": ("llama", gguf.MODEL_ARCH.LLAMA),
    "qwen2": ("qwen2", gguf.MODEL_ARCH.QWEN2),
    "qwen3": ("qwen3", gguf.MODEL_ARCH.QWEN3),
    "gemma3_text": ("gemma3", gguf.MODEL_ARCH.GEMMA3),
    "gpt_neox": ("gptneox", gguf.MODEL_ARCH.GPTNEOX),
}
MATRIX_SUFFIXES = (".weight", ".bias")


def gguf_from_huggingface(folder: Path, path: Path) -> Path:
    """The float32 model of a Hugging Face folder (one safetensors file) as a GGUF file."""
    from safetensors.numpy import load_file

    config = json.loads((folder / "config.json").read_text())
    name, architecture = ARCHITECTURES[config["model_type"]]
    names = gguf.get_tensor_name_map(architecture, config["num_hidden_layers"])
    writer = gguf.GGUFWriter(path, name)
    _add_sizes(writer, config)
    _add_rope(writer, config)
    if config["model_type"] == "gemma3_text":
        _add_gemma(writer, config)
    if config["model_type"] == "mistral" and config["sliding_window"] is not None:
        writer.add_sliding_window(config["sliding_window"])
    add_tokenizer(writer)
    for tensor, values in load_file(folder / "model.safetensors").items():
        stored = np.ascontiguousarray(_layout(config)(tensor, values, config))
        writer.add_tensor(names.get_name(tensor, MATRIX_SUFFIXES), stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_sizes(writer: gguf.GGUFWriter, config: Mapping[str, Any]) -> None:
    add_gguf_sizes(writer, config)
    if config["model_type"] == "gpt_neox":
        writer.add_parallel_residual(config["use_parallel_residual"])
        writer.add_layer_norm_eps(config["layer_norm_eps"])
        return
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(_head_dim(config))
    writer.add_value_length(_head_dim(config))
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])


def _head_dim(config: Mapping[str, Any]) -> int:
    return int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])


def _add_rope(writer: gguf.GGUFWriter, config: Mapping[str, Any]) -> None:
    rope = config["rope_parameters"]
    rope = rope.get("full_attention", rope)
    dim = int(_head_dim(config) * rope.get("partial_rotary_factor", 1.0))
    writer.add_rope_dimension_count(dim)
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope["rope_type"] == "llama3":
        writer.add_tensor("rope_freqs.weight", _llama3_factors(rope, dim))
    elif rope["rope_type"] != "default":
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(rope["factor"])
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])


def _llama3_factors(rope: Mapping[str, Any], dim: int) -> Floats:
    """What each frequency is divided by; https://arxiv.org/abs/2407.21783 gives the rule."""
    low, high, trained = (rope[key] for key in (
        "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"))  # fmt: skip
    factors = []
    for pair in range(dim // 2):
        turns = trained / (2 * math.pi * rope["rope_theta"] ** (2 * pair / dim))
        share = min(max((turns - low) / (high - low), 0), 1)
        factors.append(1 / ((1 - share) / rope["factor"] + share))
    return np.array(factors, np.float32)


def _add_gemma(writer: gguf.GGUFWriter, config: Mapping[str, Any]) -> None:
    writer.add_sliding_window(config["sliding_window"])
    writer.add_sliding_window_pattern(config["layer_types"].index("full_attention") + 1)
    writer.add_attention_scale(config["query_pre_attn_scalar"] ** -0.5)
    if config["final_logit_softcapping"] is not None:
        writer.add_final_logit_softcapping(config["final_logit_softcapping"])


Layout = Callable[[str, Floats, Mapping[str, Any]], Floats]


def _layout(config: Mapping[str, Any]) -> Layout:
    layouts: Mapping[str, Layout] = {
        "llama": _llama_layout, "mistral": _llama_layout, "gemma3_text": _gemma_layout, "gpt_neox": _neox_layout,
    }  # fmt: skip
    return layouts.get(config["model_type"], lambda name, values, config: values)


def _llama_layout(name: str, values: Floats, config: Mapping[str, Any]) -> Floats:
    """The two values of a rotary pair side by side, in weights and biases."""
    heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}.get(name.split(".")[-2])
    if heads is None:
        return values
    halves = values.reshape(config[heads], 2, -1, *values.shape[1:])
    return halves.swapaxes(1, 2).reshape(values.shape)


def _gemma_layout(name: str, values: Floats, config: Mapping[str, Any]) -> Floats:
    return values + np.float32(1) if name.endswith("norm.weight") else values


def _neox_layout(name: str, values: Floats, config: Mapping[str, Any]) -> Floats:
    """[head][query, key, value] rows become [query, key, value][head]."""
    if "query_key_value" not in name:
        return values
    by_head = values.reshape(config["num_attention_heads"], 3, -1, *values.shape[1:])
    return by_head.swapaxes(0, 1).reshape(values.shape)
