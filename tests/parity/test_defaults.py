"""What a config.json leaves out, or spells in an older way, means what it means to transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from support.checkpoints import tokenizer_json
from support.reference import MODELS, reference_logits, save_checkpoint
from support.runner import Runner
from topg.converter import ModelConverter
from topg.models import architecture_for_huggingface

TOLERANCE = 1e-3
REQUIRED = ("architectures", "model_type", "hidden_size", "intermediate_size", "num_hidden_layers",
            "num_attention_heads", "vocab_size")  # fmt: skip
SIZES: dict[str, Any] = {"vocab_size": 320, "intermediate_size": 128, "num_hidden_layers": 2}
# heads are chosen so that each family's default number of key/value heads fits and is not the number of heads
SHAPES: dict[str, dict[str, int]] = {
    "llama": {"hidden_size": 64, "num_attention_heads": 4},
    "mistral": {"hidden_size": 64, "num_attention_heads": 16},
    "qwen2": {"hidden_size": 256, "num_attention_heads": 64},
    "qwen3": {"hidden_size": 64, "num_attention_heads": 64},
    "gemma3_text": {"hidden_size": 64, "num_attention_heads": 8},
    "gpt_neox": {"hidden_size": 64, "num_attention_heads": 4},
}
PROMPT = [int(token) for token in np.random.default_rng(9).integers(3, 256, 50)]


def assert_same_logits(folder: Path) -> None:
    reference = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32).eval()
    model = ModelConverter(folder, folder.parent / "model", "float32").convert()
    given = Runner(model, kv_dtype="float32").logits(PROMPT)
    np.testing.assert_allclose(given, reference_logits(reference, PROMPT), rtol=0, atol=TOLERANCE)


def edit(folder: Path, *absent: str, **changes: Any) -> None:
    path = folder / "config.json"
    config = {key: value for key, value in json.loads(path.read_text()).items() if key not in absent}
    path.write_text(json.dumps(config | changes))


@pytest.mark.parametrize("model_type", SHAPES)
def test_only_the_sizes_are_given(model_type: str, tmp_path: Path) -> None:
    save_checkpoint({"model_type": model_type, **SIZES, **SHAPES[model_type]}, tmp_path / "source", tokenizer_json())
    path = tmp_path / "source" / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({key: config[key] for key in REQUIRED}))
    assert_same_logits(tmp_path / "source")


@pytest.mark.parametrize(
    ("name", "absent", "changes"),
    [
        ("neox-parallel", ["use_parallel_residual"], {}),
        ("neox-rotary-half", ["rope_parameters"], {"rotary_pct": 0.5, "rotary_emb_base": 10000}),
        ("llama-rope-linear", ["rope_parameters"],
         {"rope_theta": 10000.0, "rope_scaling": {"type": "linear", "factor": 4.0}}),
        ("llama-rope-yarn", ["rope_parameters"],
         {"rope_theta": 10000.0, "rope_scaling":
             {"rope_type": "yarn", "type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}}),
        ("gemma3", ["rope_parameters", "layer_types"],
         {"rope_theta": 1e6, "rope_local_base_freq": 1e4, "sliding_window_pattern": 2}),
        ("gemma3-softcap", ["rope_parameters"],
         {"rope_theta": 1e6, "rope_local_base_freq": 1e4, "rope_scaling": {"rope_type": "linear", "factor": 8.0}}),
    ],
)  # fmt: skip
def test_older_spellings(name: str, absent: list[str], changes: dict[str, Any], tmp_path: Path) -> None:
    save_checkpoint(MODELS[name], tmp_path / "source", tokenizer_json())
    edit(tmp_path / "source", *absent, **changes)
    assert_same_logits(tmp_path / "source")


class Settings:
    """A config.json as a model file sees it."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.settings, self.tensor_names = settings, ()


@pytest.mark.parametrize("window", [{}, {"sliding_window": None}, {"sliding_window": 77}])
@pytest.mark.parametrize("model_type", ["mistral", "qwen2", "qwen3"])
def test_an_absent_window_is_not_a_null_one(model_type: str, window: dict[str, Any]) -> None:
    """Too long to show in the logits of a tiny model."""
    config = {**SIZES, **SHAPES[model_type], "use_sliding_window": True, "max_window_layers": 0, **window}
    theirs = AutoConfig.for_model(model_type, **config)
    ours = architecture_for_huggingface(model_type, []).read_huggingface(Settings(config))  # type: ignore[arg-type]
    assert ours.windows == (theirs.sliding_window,) * 2


@pytest.mark.parametrize("model_type", ["llama", "mistral", "qwen2", "qwen3"])
def test_null_key_value_heads_are_as_many_as_heads(model_type: str) -> None:
    config = {**SIZES, **SHAPES[model_type], "num_key_value_heads": None}
    ours = architecture_for_huggingface(model_type, []).read_huggingface(Settings(config))  # type: ignore[arg-type]
    assert ours.kv_heads == config["num_attention_heads"]
