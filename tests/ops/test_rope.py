"""Rotary tables against transformers' own."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from topg.errors import CheckpointError
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


@pytest.mark.parametrize(
    ("dim", "theta", "scaling", "message"),
    [
        (7, 1e4, None, "7 rotated values"),
        (0, 1e4, None, "0 rotated values"),
        (8, 0.0, None, "theta is 0.0"),
        (8, float("inf"), None, "theta is inf"),
        (8, 1.0, YarnScaling(4.0, 64), "theta is 1.0; expected more than 1"),
        (8, 1e13, None, "theta is 1"),
        (8, 1e4, YarnScaling(4.0, 64, beta_fast=1.0, beta_slow=2.0), "must not be below beta_slow"),
        (8, 1e4, LinearScaling(1e7), "linear factor is 10000000.0; expected 0.001 to 1,000,000"),
        (8, 1e4, DynamicScaling(2.0, 1 << 40), "dynamic original_length is 1099511627776"),
        (8, 1e4, YarnScaling(4.0, 0), "yarn original_length is 0"),
        (8, 1e4, LinearScaling(0.0), "linear factor is 0.0"),
        (2, 1e4, DynamicScaling(2.0, 64), "more than 2 rotated values"),
        (8, 1e4, Llama3Scaling(8.0, 4.0, 4.0, 64), "low_freq_factor 4.0 must be below"),
        (8, 1e4, FactorScaling((1.0, 2.0)), "2 factors are given; expected 4"),
        (4, 1e4, FactorScaling((1.0, 0.0)), "factors factors is 0.0"),
    ],
)
def test_values_without_finite_angles_are_refused(
    dim: int, theta: float, scaling: RopeScaling | None, message: str
) -> None:
    with pytest.raises(CheckpointError, match=message):
        Rope(dim, theta, scaling)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("theta", [math.nextafter(1.0, 2.0), 1e12])
@pytest.mark.parametrize(
    "scaling",
    [
        None, *(LinearScaling(factor) for factor in (1e-3, 1e6)),
        *(DynamicScaling(factor, length) for factor in (1e-3, 1e6) for length in (1, 1 << 31)),
        *(
            YarnScaling(factor, length, beta_fast=1e6, beta_slow=1e-3)
            for factor in (1e-3, 1e6) for length in (1, 1 << 31)
        ),
        *(Llama3Scaling(factor, 1e-3, 1e6, length) for factor in (1e-3, 1e6) for length in (1, 1 << 31)),
    ],
)  # fmt: skip
def test_every_value_that_is_allowed_gives_finite_angles(theta: float, scaling: RopeScaling | None) -> None:
    rope = Rope(8, theta, scaling)
    assert np.isfinite(rope.angles(np.array([0, 1, (1 << 31) - 1]))).all() and math.isfinite(rope.attention_factor)
