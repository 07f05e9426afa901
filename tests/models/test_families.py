"""Config reading of every family: spellings, defaults, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from topg.errors import CheckpointError, UnsupportedModelError
from topg.models import architecture_for_gguf, architecture_for_huggingface, supported
from topg.ops.rope import (
    DynamicScaling,
    FactorScaling,
    LinearScaling,
    Llama3Scaling,
    Rope,
    YarnScaling,
)
from topg.plan import Plan

LLAMA: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 320, "max_position_embeddings": 2048,
}  # fmt: skip


class FakeCheckpoint:
    """Settings and tensor names as a model file sees them."""

    def __init__(self, settings: Mapping[str, Any], names: tuple[str, ...] = (), **vectors: np.ndarray) -> None:
        self.settings, self.tensor_names, self._vectors = settings, names, vectors

    def vector(self, name: str) -> np.ndarray:
        return self._vectors[name.replace(".", "_")]


def read(**changes: Any) -> Any:
    settings = {**LLAMA, **changes}
    return architecture_for_huggingface(settings["model_type"], []).read_huggingface(FakeCheckpoint(settings))


def read_gguf(architecture: str, names: tuple[str, ...] = (), **changes: Any) -> Any:
    settings = {
        "block_count": 2, "embedding_length": 64, "attention.head_count": 4, "attention.head_count_kv": 2,
        "context_length": 2048, "feed_forward_length": 128, "attention.layer_norm_rms_epsilon": 1e-5,
        "vocab_size": 320, **{key.replace("__", "."): value for key, value in changes.items()},
    }  # fmt: skip
    vectors = {"rope_freqs_weight": np.linspace(1, 8, 8, dtype=np.float32)}
    return architecture_for_gguf(architecture).read_gguf(FakeCheckpoint(settings, names, **vectors))


def test_every_family_is_listed() -> None:
    assert supported() == ("gemma3_text", "gpt_neox", "llama", "mistral", "qwen2", "qwen3")


def test_unknown_family_lists_what_is_supported() -> None:
    with pytest.raises(UnsupportedModelError, match=r"'bert' is not supported; supported: gemma3_text, .*qwen3"):
        architecture_for_huggingface("bert", [])
    with pytest.raises(UnsupportedModelError, match=r"'mamba' is not supported; supported: gemma3, gptneox"):
        architecture_for_gguf("mamba")


def test_another_head_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="only LlamaForCausalLM is supported"):
        architecture_for_huggingface("llama", ["LlamaForSequenceClassification"])


def test_head_dim_need_not_be_hidden_over_heads() -> None:
    assert read(head_dim=32).head_dim == 32
    assert read(head_dim=None).head_dim == 16
    assert read(model_type="qwen3").head_dim == 128


@pytest.mark.parametrize(
    "spelling",
    [
        {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 4.0}},
        {"rope_theta": 5e5, "rope_scaling": {"rope_type": "linear", "factor": 4.0}},
        {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 5e5}},
    ],
)
def test_rope_spellings_agree(spelling: dict[str, Any]) -> None:
    assert read(**spelling).ropes == (Rope(16, 5e5, LinearScaling(4.0)),) * 2


@pytest.mark.parametrize(
    ("section", "scaling"),
    [
        ({"rope_type": "default"}, None),
        ({"type": "dynamic", "factor": 2.0}, DynamicScaling(2.0, 2048)),
        (
            {"rope_type": "llama3", "factor": 8, "low_freq_factor": 1, "high_freq_factor": 4,
             "original_max_position_embeddings": 64},
            Llama3Scaling(8.0, 1.0, 4.0, 64),
        ),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}, YarnScaling(4.0, 64)),
        ({"rope_type": "yarn", "original_max_position_embeddings": 512}, YarnScaling(4.0, 512)),
    ],
)  # fmt: skip
def test_rope_kinds(section: dict[str, Any], scaling: Any) -> None:
    assert read(rope_scaling=section).ropes[0] == Rope(16, 10000.0, scaling)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rope_scaling": {"type": "longrope", "factor": 4.0}}, "supported rope types"),
        ({"rope_scaling": {"type": "linear", "factor": 4.0, "twist": 3}}, "twist"),
        ({"rope_scaling": {"type": "linear", "factor": 4.0}, "rope_parameters": {"rope_type": "default"}}, "keep one"),
        ({"rope_scaling": {"type": "linear", "factor": -1}}, "factor is -1; expected a positive number"),
        ({"hidden_act": "swoosh"}, "supported activations"),
        ({"sliding_window": 16}, "no sliding window"),
        ({"num_hidden_layers": 10**6}, "num_hidden_layers is 1000000; expected a whole number from 1 to 1,024"),
        ({"hidden_size": "64"}, "hidden_size is '64'"),
        ({"hidden_size": True}, "hidden_size is True"),
        ({"vocab_size": None}, "has no 'vocab_size'"),
        ({"num_key_value_heads": 3}, "cannot share 3"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings is 'no'; expected true or false"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps"),
        ({"model_type": "qwen2", "layer_types": ["full_attention"]}, "expected 2 entries"),
        ({"model_type": "qwen2", "layer_types": ["sliding_attention"] * 2}, "no sliding_window is in effect"),
    ],
)
def test_bad_settings_are_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises((CheckpointError, UnsupportedModelError), match=message):
        read(**changes)


def test_unknown_settings_are_reported_and_inert_ones_are_not() -> None:
    config = read(logit_twist=2.0, torch_dtype="bfloat16", transformers_version="5.0", embedding_multiplier=None)
    assert config.notes == ("config.json: these settings are not known and have no effect: logit_twist",)


def test_gemma_windows_follow_the_pattern() -> None:
    config = read(model_type="gemma3_text", num_hidden_layers=12, sliding_window=512, sliding_window_pattern=6)
    assert [layer for layer, window in enumerate(config.windows) if window is None] == [5, 11]
    assert config.windows[0] == 512 and config.head_dim == 256
    assert (config.ropes[5].theta, config.ropes[0].theta) == (1e6, 1e4)


def test_gemma_scaling_of_older_files_is_for_global_layers_only() -> None:
    config = read(model_type="gemma3_text", num_hidden_layers=6, rope_scaling={"rope_type": "linear", "factor": 8.0})
    assert config.ropes[5].scaling == LinearScaling(8.0) and config.ropes[0].scaling is None


def test_neox_residual_is_parallel_unless_switched_off() -> None:
    neox = {"model_type": "gpt_neox", "num_key_value_heads": None}
    absent, true, false = (read(**neox, **flag) for flag in ({}, {"use_parallel_residual": True},
                                                             {"use_parallel_residual": False}))  # fmt: skip
    assert (absent.parallel_residual, true.parallel_residual, false.parallel_residual) == (True, True, False)
    assert absent.ropes[0].dim == 4


def test_rotary_share_must_give_pairs() -> None:
    with pytest.raises(CheckpointError, match=r"rotary share of 0\.2 .* gives 3 values; expected an even number"):
        read(model_type="gpt_neox", num_key_value_heads=None, rotary_pct=0.2)


def test_gguf_head_and_biases_follow_the_tensors() -> None:
    config = read_gguf("llama", ("output.weight", "blk.0.attn_q.bias"))
    assert (config.tied, config.qkv_bias, config.mlp_bias) == (False, True, False)
    assert read_gguf("llama").tied


def test_gguf_rope_factors_and_scaling() -> None:
    factors = read_gguf("llama", ("rope_freqs.weight",)).ropes[0].scaling
    assert isinstance(factors, FactorScaling) and factors.factors[0] == 1.0 and len(factors.factors) == 8
    linear = read_gguf("qwen2", rope__scaling__type="linear", rope__scaling__factor=4.0)
    assert linear.ropes[0].scaling == LinearScaling(4.0)
    with pytest.raises(UnsupportedModelError, match="supported: none, linear, yarn"):
        read_gguf("llama", rope__scaling__type="longrope")


def test_gguf_layer_count_is_bounded() -> None:
    with pytest.raises(CheckpointError, match="block_count is 1000000"):
        read_gguf("llama", block_count=10**6)


@pytest.mark.parametrize("model_type", supported())
def test_plan_uses_exactly_the_tensor_table_and_survives_json(model_type: str) -> None:
    architecture = architecture_for_huggingface(model_type, [])
    config = read(model_type=model_type, **({"num_key_value_heads": None} if model_type == "gpt_neox" else {}))
    plan = architecture.plan(config)
    assert sorted(spec.name for spec in architecture.tensors(config)) == sorted(plan.tensor_names)
    assert len({op.name for op in plan.ops}) == len(plan.ops)
    assert Plan.from_json(json.loads(json.dumps(plan.to_json()))) == plan


def test_interleaved_rows_put_pairs_back() -> None:
    from topg.models.llama import interleaved_rows

    assert interleaved_rows(1, 8, 8).tolist() == [0, 2, 4, 6, 1, 3, 5, 7]
    assert interleaved_rows(2, 4, 2).tolist() == [0, 1, 2, 3, 4, 5, 6, 7]
