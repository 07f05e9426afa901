"""Config reading of every family: spellings, defaults, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from topg.errors import CheckpointError, UnsupportedModelError
from topg.models import architecture_for_gguf, architecture_for_huggingface, supported
from topg.ops import Logits
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
        ({"rope_scaling": {"type": "linear", "factor": -1}}, "factor is -1; expected a number from"),
        ({"hidden_act": "swoosh"}, "supported activations"),
        ({"sliding_window": 16}, "no sliding window"),
        ({"num_hidden_layers": 10**6}, "num_hidden_layers is 1000000; expected a whole number from 1 to 1,024"),
        ({"hidden_size": "64"}, "hidden_size is '64'"),
        ({"hidden_size": True}, "hidden_size is True"),
        ({"vocab_size": None}, "has no 'vocab_size'"),
        ({"num_key_value_heads": 3}, "cannot share 3"),
        ({"num_attention_heads": 3, "num_key_value_heads": 3}, "64 cannot be shared by 3 attention heads"),
        ({"num_attention_heads": 128}, "64 cannot be shared by 128 attention heads"),
        ({"model_type": "gpt_neox", "hidden_size": 100, "num_attention_heads": 3}, "100 cannot be shared by 3"),
        ({"rope_scaling": {"type": "linear", "rope_type": "yarn", "factor": 4.0}}, "rope_type is 'yarn'; keep one"),
        ({"rope_scaling": {"rope_type": 5}}, "rope_type is 5; expected a string"),
        ({"rope_theta": 1, "rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "theta is 1.0; expected more than 1"),
        ({"rope_theta": 1e300}, "rope_theta is 1e.300; expected a number"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "yarn needs its factor, or original_max_position_embeddings"),
        ({"rope_scaling": {"type": "linear", "factor": 1e9}}, "linear factor is 1000000000.0; expected 0.001"),
        ({"rms_norm_eps": 0}, "rms_norm_eps is 0; expected a number from 1e-30 to 1"),
        ({"rms_norm_eps": 2}, "rms_norm_eps is 2; expected a number from 1e-30 to 1"),
        ({"model_type": "mistral", "layer_types": ["full_attention"] * 2}, "all 2 layers are sliding_attention"),
        ({"hidden_act": "x" * 60_000}, r"hidden_act is 'x{79}[.]{3}: supported"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8, "low_freq_factor": 2, "high_freq_factor": 2}},
         "low_freq_factor 2.0 must be below high_freq_factor 2.0"),
        ({"head_dim": 2, "rope_scaling": {"type": "dynamic", "factor": 2.0}}, "more than 2 rotated values"),
        ({"model_type": "gemma3_text", "sliding_window": None}, "sliding_window is None: the local layers"),
        ({"model_type": "gemma3_text", "rope_scaling": {"type": "linear", "factor": 8.0},
          "rope_parameters": {"full_attention": {"rope_type": "default"}}}, "keep one of them"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings is 'no'; expected true or false"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps"),
        ({"model_type": "qwen2", "layer_types": ["full_attention"]}, "expected 2 entries"),
        ({"model_type": "qwen2", "layer_types": ["sliding_attention"] * 2}, "no sliding_window is in effect"),
    ],
)  # fmt: skip
def test_bad_settings_are_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises((CheckpointError, UnsupportedModelError), match=message):
        read(**changes)


def test_unknown_settings_are_reported_and_inert_ones_are_not() -> None:
    config = read(logit_twist=2.0, torch_dtype="bfloat16", transformers_version="5.0", embedding_multiplier=None)
    assert config.notes == ("config.json: these settings are not known and have no effect: 'logit_twist'",)


@pytest.mark.parametrize("model_type", supported())
@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("final_logit_softcapping", 30.0), ("attn_logit_softcapping", 50.0), ("num_local_experts", 8),
        ("num_experts", 4), ("embedding_multiplier", 12), ("attention_multiplier", 0.015625),
        ("residual_multiplier", 0.22), ("logits_scaling", 8), ("logit_scale", 0.0625), ("rope_interleaved", True),
        ("layer_types", ["full_attention", "linear_attention"]), ("text_config", {"hidden_size": 64}),
        ("vision_config", {"hidden_size": 64}), ("is_encoder_decoder", True),
    ],
)  # fmt: skip
def test_settings_that_change_the_arithmetic_are_refused(model_type: str, key: str, value: Any) -> None:
    if model_type == "gemma3_text" and key.endswith("_softcapping"):
        pytest.skip("it has this setting")
    with pytest.raises(UnsupportedModelError, match=rf"config.json: {key} is"):
        read(model_type=model_type, **{key: value})


@pytest.mark.parametrize("model_type", ["llama", "gpt_neox"])
def test_settings_that_leave_the_arithmetic_as_it_is_pass(model_type: str) -> None:
    neutral = {"final_logit_softcapping": None, "num_experts": 0, "embedding_multiplier": 1.0, "logits_scaling": 1,
               "layer_types": ["full_attention"] * 2, "rope_interleaved": False, "vision_config": {}}  # fmt: skip
    heads = {"num_key_value_heads": None}
    assert read(model_type=model_type, **heads, **neutral).notes == ()


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


@pytest.mark.parametrize(
    ("architecture", "key", "value"),
    [
        ("llama", "attention.causal", False),
        ("llama", "logit_scale", 0.5),
        ("llama", "attn_logit_softcapping", 30.0),
        ("llama", "final_logit_softcapping", 30.0),
        ("llama", "expert_count", 8),
        ("qwen2", "attention.clamp_kqv", 8.0),
        ("qwen3", "rope.scaling.attn_factor", 2.0),
        ("gptneox", "attention.causal", False),
        ("gptneox", "attention.sliding_window", 64),
        ("gemma3", "embedding_scale", 2.0),
    ],
)
def test_gguf_settings_that_change_the_arithmetic_are_refused(architecture: str, key: str, value: Any) -> None:
    extra = {"attention.layer_norm_epsilon": 1e-5} if architecture == "gptneox" else {}
    window = {"attention.sliding_window": 16} if architecture == "gemma3" else {}
    with pytest.raises(UnsupportedModelError, match=f"{key} is {value}: this architecture has no such setting"):
        read_gguf(architecture, **extra, **window, **{key: value})


def test_gguf_settings_that_are_off_or_tell_no_arithmetic_pass() -> None:
    settings = {"attention.causal": True, "logit_scale": 1.0, "expert_count": 0, "general.file_type": 7,
                "tokenizer.ggml.model": "gpt2", "rope.scaling.finetuned": True}  # fmt: skip
    assert read_gguf("llama", **settings).notes == ()
    notes = ("GGUF metadata: these settings are not known and have no effect: 'logit_twist'",)
    assert read_gguf("llama", **settings, logit_twist=2).notes == notes
    neox = {"attention.layer_norm_epsilon": 1e-5, "attention.head_count_kv": None,
            "attention.layer_norm_rms_epsilon": None}  # fmt: skip
    assert read_gguf("gptneox", **neox, **settings, logit_twist=2).notes == notes


@pytest.mark.parametrize("kind", ["linear", "yarn"])
def test_gguf_factors_and_scaling_do_not_go_together(kind: str) -> None:
    with pytest.raises(UnsupportedModelError, match="the file also holds rope_freqs"):
        read_gguf("llama", ("rope_freqs.weight",), rope__scaling__type=kind, rope__scaling__factor=4.0)


def test_gguf_linear_scaling_in_older_spellings() -> None:
    for spelling in ({"rope.scaling.factor": 4.0}, {"rope.scale_linear": 4.0}):
        assert read_gguf("llama", **spelling).ropes[0].scaling == LinearScaling(4.0)
    for off in ({"rope.scaling.type": "none", "rope.scaling.factor": 4.0}, {"rope.scale_linear": 1.0}):
        assert read_gguf("llama", **off).ropes[0].scaling is None


def test_gguf_heads_must_share_the_hidden_size() -> None:
    for architecture in ("llama", "gptneox"):
        with pytest.raises(CheckpointError, match="64 cannot be shared by 3 attention heads"):
            read_gguf(architecture, attention__head_count=3, attention__head_count_kv=3)


def test_gemma_soft_caps_reach_the_plan() -> None:
    config = read(model_type="gemma3_text", sliding_window=16, attn_logit_softcapping=50.0, final_logit_softcapping=30)
    plan = architecture_for_huggingface("gemma3_text", []).plan(config)
    assert [op.softcap for op in plan.attention] == [50.0, 50.0]
    assert isinstance(plan.ops[-1], Logits) and plan.ops[-1].softcap == 30.0


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
