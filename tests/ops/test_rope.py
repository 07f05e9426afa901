"""Rotary tables against transformers' own."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from topg.ops.rope import (
    DynamicScaling,
    FactorScaling,
    LinearScaling,
    Llama3Scaling,
    Rope,
    RopeScaling,
    YarnScaling,
)

CASES: list[tuple[dict[str, Any], RopeScaling]] = [
    ({"rope_type": "linear", "factor": 4.0}, LinearScaling(4.0)),
    (
        {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
         "original_max_position_embeddings": 64},
        Llama3Scaling(8.0, 1.0, 4.0, 64),
    ),
    ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}, YarnScaling(4.0, 512)),
    (
        {"rope_type": "yarn", "factor": 40.0, "original_max_position_embeddings": 4096, "beta_fast": 48.0,
         "beta_slow": 2.0, "mscale": 1.0, "mscale_all_dim": 0.8, "truncate": False},
        YarnScaling(40.0, 4096, 48.0, 2.0, None, 1.0, 0.8, False),
    ),
]  # fmt: skip


def table(config: dict[str, Any], length: int | None = None) -> tuple[np.ndarray, float]:
    settings = LlamaConfig(
        hidden_size=512, num_attention_heads=8, head_dim=64, max_position_embeddings=2048,
        rope_parameters={"rope_theta": 10000.0, **config},
    )  # fmt: skip
    inverse, factor = ROPE_INIT_FUNCTIONS[config["rope_type"]](settings, torch.device("cpu"), seq_len=length)
    return inverse.double().numpy(), float(factor)


@pytest.mark.parametrize(("config", "scaling"), CASES, ids=lambda case: getattr(case, "kind", None))
def test_tables_agree_with_transformers(config: dict[str, Any], scaling: RopeScaling) -> None:
    inverse, factor = table(config)
    rope = Rope(64, 10000.0, scaling)
    np.testing.assert_allclose(rope.angles(np.array([1]))[0], inverse, rtol=3e-6)
    assert rope.attention_factor == pytest.approx(factor, rel=1e-7)


@pytest.mark.parametrize("position", [0, 2047, 2048, 5000])
def test_dynamic_base_is_the_one_of_token_by_token_decoding(position: int) -> None:
    inverse, _ = table({"rope_type": "dynamic", "factor": 2.0}, length=position + 1)
    rope = Rope(64, 10000.0, DynamicScaling(2.0, 2048))
    np.testing.assert_allclose(rope.angles(np.array([position]))[0], position * inverse, rtol=2e-6)


def test_llama3_equals_its_factors() -> None:
    """A GGUF keeps LLaMA 3's scaling as one factor per frequency."""
    plain, llama3 = Rope(64, 5e5), Rope(64, 5e5, Llama3Scaling(8.0, 1.0, 4.0, 8192))
    one = np.array([1])
    factors = FactorScaling(tuple(float(f) for f in plain.angles(one)[0] / llama3.angles(one)[0]))
    positions = np.array([0, 7, 9000])
    np.testing.assert_allclose(Rope(64, 5e5, factors).angles(positions), llama3.angles(positions), rtol=1e-9)


def test_angles_are_positions_times_frequencies() -> None:
    angles = Rope(8, 10000.0).angles(np.array([0, 3]))
    np.testing.assert_allclose(angles, [[0] * 4, [3.0, 0.3, 0.03, 0.003]], rtol=1e-6)
