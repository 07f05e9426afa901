"""A GGUF file and the Hugging Face folder it was made from give the same model and the same logits."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from support.checkpoints import tokenizer_json
from support.gguf_families import gguf_from_huggingface
from support.reference import MODELS, save_checkpoint
from support.runner import Runner
from topg.converter import ModelConverter
from topg.converter.blueprint import draw_blueprint
from topg.converter.source import open_source

EXACT_IN_FLOAT32 = 2.0**-20  # a GGUF keeps numbers as float32
NOT_IN_GGUF = {"llama-rope-dynamic", "llama-rope-yarn-mscale", "qwen2-window"}
ROUNDED_ROPE = {"llama-rope-llama3", "llama-rope-yarn"}  # float32 factors in the file
PROMPT = [int(token) for token in np.random.default_rng(8).integers(3, 256, 90)]


@pytest.mark.parametrize("name", [name for name in MODELS if name not in NOT_IN_GGUF])
def test_gguf_and_huggingface_give_the_same_logits(name: str, tmp_path: Path) -> None:
    eps = "layer_norm_eps" if name.startswith("neox") else "rms_norm_eps"
    folder = tmp_path / "source"
    save_checkpoint({**MODELS[name], eps: EXACT_IN_FLOAT32}, folder, tokenizer_json())
    file = gguf_from_huggingface(folder, tmp_path / "model.gguf")
    left, right = (draw_blueprint(open_source(path), "float32") for path in (folder, file))
    assert right.warnings == ()
    assert replace(left.config, ropes=()) == replace(right.config, ropes=())
    if name not in ROUNDED_ROPE:
        assert left.plan == right.plan
    expected, given = (
        Runner(ModelConverter(path, tmp_path / path.stem / "model", "float32").convert(), "float32").logits(PROMPT)
        for path in (folder, file)
    )
    np.testing.assert_allclose(given, expected, rtol=0, atol=2e-4 if name in ROUNDED_ROPE else 0)
