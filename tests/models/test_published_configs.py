"""Settings as published models carry them are read without a refusal and without a note."""

from __future__ import annotations

from typing import Any

import pytest

from models.test_families import FakeCheckpoint
from topg.models import architecture_for_huggingface
from topg.ops.rope import Llama3Scaling

COMMON: dict[str, Any] = {
    "attention_dropout": 0.0, "initializer_range": 0.02, "torch_dtype": "bfloat16", "transformers_version": "4.44.0",
    "use_cache": True,
}  # fmt: skip

PUBLISHED: dict[str, dict[str, Any]] = {
    "SmolLM2-135M-Instruct": {
        "architectures": ["LlamaForCausalLM"], "attention_bias": False, "bos_token_id": 1, "eos_token_id": 2,
        "hidden_act": "silu", "hidden_size": 576, "intermediate_size": 1536, "is_llama_config": True,
        "max_position_embeddings": 8192, "mlp_bias": False, "model_type": "llama", "num_attention_heads": 9,
        "num_hidden_layers": 30, "num_key_value_heads": 3, "pad_token_id": 2, "pretraining_tp": 1,
        "rms_norm_eps": 1e-05, "rope_interleaved": False, "rope_scaling": None, "rope_theta": 100000,
        "tie_word_embeddings": True, "transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16"}},
        "vocab_size": 49152,
    },
    "Llama-3.2-1B-Instruct": {
        "architectures": ["LlamaForCausalLM"], "attention_bias": False, "bos_token_id": 128000,
        "eos_token_id": [128001, 128008, 128009], "head_dim": 64, "hidden_act": "silu", "hidden_size": 2048,
        "intermediate_size": 8192, "max_position_embeddings": 131072, "mlp_bias": False, "model_type": "llama",
        "num_attention_heads": 32, "num_hidden_layers": 16, "num_key_value_heads": 8, "pretraining_tp": 1,
        "rms_norm_eps": 1e-05, "rope_theta": 500000.0, "tie_word_embeddings": True, "vocab_size": 128256,
        "rope_scaling": {"factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
                         "original_max_position_embeddings": 8192, "rope_type": "llama3"},
    },
    "Mistral-7B-v0.1": {
        "architectures": ["MistralForCausalLM"], "bos_token_id": 1, "eos_token_id": 2, "hidden_act": "silu",
        "hidden_size": 4096, "intermediate_size": 14336, "max_position_embeddings": 32768, "model_type": "mistral",
        "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8, "rms_norm_eps": 1e-05,
        "rope_theta": 10000.0, "sliding_window": 4096, "tie_word_embeddings": False, "vocab_size": 32000,
    },
    "Mistral-7B-Instruct-v0.3": {
        "architectures": ["MistralForCausalLM"], "bos_token_id": 1, "eos_token_id": 2, "hidden_act": "silu",
        "hidden_size": 4096, "intermediate_size": 14336, "max_position_embeddings": 32768, "model_type": "mistral",
        "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8, "rms_norm_eps": 1e-05,
        "rope_theta": 1000000.0, "sliding_window": None, "tie_word_embeddings": False, "vocab_size": 32768,
    },
    "Qwen2.5-0.5B-Instruct": {
        "architectures": ["Qwen2ForCausalLM"], "bos_token_id": 151643, "eos_token_id": 151645, "hidden_act": "silu",
        "hidden_size": 896, "intermediate_size": 4864, "max_position_embeddings": 32768, "max_window_layers": 21,
        "model_type": "qwen2", "num_attention_heads": 14, "num_hidden_layers": 24, "num_key_value_heads": 2,
        "rms_norm_eps": 1e-06, "rope_theta": 1000000.0, "sliding_window": 32768, "tie_word_embeddings": True,
        "use_sliding_window": False, "vocab_size": 151936,
    },
    "Qwen2.5-0.5B": {
        "architectures": ["Qwen2ForCausalLM"], "bos_token_id": 151643, "eos_token_id": 151643, "hidden_act": "silu",
        "hidden_size": 896, "intermediate_size": 4864, "max_position_embeddings": 32768, "max_window_layers": 24,
        "model_type": "qwen2", "num_attention_heads": 14, "num_hidden_layers": 24, "num_key_value_heads": 2,
        "rms_norm_eps": 1e-06, "rope_theta": 1000000.0, "sliding_window": 32768, "tie_word_embeddings": True,
        "use_mrope": False, "use_sliding_window": False, "vocab_size": 151936,
    },
    "Qwen3-0.6B": {
        "architectures": ["Qwen3ForCausalLM"], "attention_bias": False, "bos_token_id": 151643, "eos_token_id": 151645,
        "head_dim": 128, "hidden_act": "silu", "hidden_size": 1024, "intermediate_size": 3072,
        "max_position_embeddings": 40960, "max_window_layers": 28, "model_type": "qwen3", "num_attention_heads": 16,
        "num_hidden_layers": 28, "num_key_value_heads": 8, "rms_norm_eps": 1e-06, "rope_scaling": None,
        "rope_theta": 1000000, "sliding_window": None, "tie_word_embeddings": True, "use_sliding_window": False,
        "vocab_size": 151936,
    },
    "gemma-3-270m": {
        "architectures": ["Gemma3ForCausalLM"], "_sliding_window_pattern": 6, "attention_bias": False,
        "attn_logit_softcapping": None, "bos_token_id": 2, "eos_token_id": 1, "final_logit_softcapping": None,
        "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 640, "intermediate_size": 2048,
        "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 3, "max_position_embeddings": 32768,
        "model_type": "gemma3_text", "num_attention_heads": 4, "num_hidden_layers": 18, "num_key_value_heads": 1,
        "pad_token_id": 0, "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-06, "rope_local_base_freq": 10000.0,
        "rope_scaling": None, "rope_theta": 1000000.0, "sliding_window": 512, "use_bidirectional_attention": False,
        "vocab_size": 262144,
    },
    "pythia-70m": {
        "architectures": ["GPTNeoXForCausalLM"], "bos_token_id": 0, "eos_token_id": 0, "hidden_act": "gelu",
        "hidden_size": 512, "intermediate_size": 2048, "layer_norm_eps": 1e-05, "max_position_embeddings": 2048,
        "model_type": "gpt_neox", "num_attention_heads": 8, "num_hidden_layers": 6, "rotary_emb_base": 10000,
        "rotary_pct": 0.25, "tie_word_embeddings": False, "use_parallel_residual": True, "vocab_size": 50304,
    },
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_settings_are_understood(name: str) -> None:
    settings = COMMON | PUBLISHED[name]
    architecture = architecture_for_huggingface(settings["model_type"], settings["architectures"])
    config = architecture.read_huggingface(FakeCheckpoint(settings))
    assert config.notes == ()
    assert len(architecture.plan(config).attention) == settings["num_hidden_layers"]


def test_what_they_mean() -> None:
    def read(name: str) -> Any:
        settings = COMMON | PUBLISHED[name]
        return architecture_for_huggingface(settings["model_type"], []).read_huggingface(FakeCheckpoint(settings))

    assert read("Llama-3.2-1B-Instruct").ropes[0].scaling == Llama3Scaling(32.0, 1.0, 4.0, 8192)
    assert set(read("Mistral-7B-v0.1").windows) == {4096}
    assert set(read("Mistral-7B-Instruct-v0.3").windows) == {None}
    assert set(read("Qwen2.5-0.5B-Instruct").windows) == {None} and read("Qwen2.5-0.5B-Instruct").qkv_bias
    assert read("gemma-3-270m").windows[4:6] == (512, None)
    assert read("pythia-70m").ropes[0].dim == 16
