"""Both back ends against transformers, in float32: every family, several lengths, every way to cut a prompt."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from support.checkpoints import tokenizer_json
from support.reference import MODELS, reference_logits, reference_logits_token_by_token, save_checkpoint
from support.runner import Runner
from topg.backends.base import BackendName
from topg.converter import ModelConverter

BACKENDS: tuple[BackendName, ...] = ("native", "torch")
LENGTHS = (1, 31, 32, 33, 64, 200)
CHUNKS = (1, 7, 32)
TOLERANCE = 1e-3
TOKEN_BY_TOKEN = {"llama-rope-dynamic"}  # transformers' own full pass rotates every token by the longest length


@pytest.fixture(scope="module")
def prompt() -> list[int]:
    return [int(token) for token in np.random.default_rng(5).integers(3, 256, max(LENGTHS))]


@pytest.mark.parametrize("name", MODELS)
def test_logits_agree(name: str, prompt: list[int], tmp_path: Path) -> None:
    reference = save_checkpoint(MODELS[name], tmp_path / "source", tokenizer_json())
    model = ModelConverter(tmp_path / "source", tmp_path / "model", "float32").convert()
    expected = (reference_logits_token_by_token if name in TOKEN_BY_TOKEN else reference_logits)(reference, prompt)
    for backend in BACKENDS:
        runner = Runner(model, kv_dtype="float32", backend=backend)
        for length in LENGTHS:
            np.testing.assert_allclose(runner.logits(prompt[:length]), expected[:length], atol=TOLERANCE, rtol=0)
        for chunk in CHUNKS:
            np.testing.assert_allclose(runner.logits(prompt, chunk=chunk), expected, atol=TOLERANCE, rtol=0)


def test_the_context_matters(prompt: list[int], tmp_path: Path) -> None:
    """The comparison above would not notice a forgotten context if the models did not depend on it."""
    for name in ("llama", "gemma3", "neox-parallel"):
        reference = save_checkpoint(MODELS[name], tmp_path / name, tokenizer_json())
        changed = [prompt[0] ^ 1, *prompt[1:]]
        effect = reference_logits(reference, changed)[-1] - reference_logits(reference, prompt)[-1]
        assert np.abs(effect).max() > 100 * TOLERANCE, name
