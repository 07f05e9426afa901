"""The demo models, end to end: pulled by their pinned hashes, converted, and compared with transformers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from support.reports import SilentReport
from topg import LLM, SamplingParams
from topg.hub.catalogue import CATALOGUE
from topg.hub.pull import pull_catalogue
from topg.hub.store import Store
from topg.paths import Home

PROMPTS = (
    "The capital of France is",
    "def fibonacci(n):\n",
    "Once upon a time, in a small house near the forest,",
    "1, 2, 3,",
)
TOKENS = 48
NEAR_TIE = 1e-3


@pytest.fixture(scope="module", params=["smollm2-135m", "gemma3-270m"])
def gguf(request: pytest.FixtureRequest) -> Path:
    """The model in the user's own store: fetched once, then there."""
    return pull_catalogue(CATALOGUE[request.param], Store(Home.find()), SilentReport())


@pytest.mark.model
@pytest.mark.slow
def test_greedy_text_is_that_of_transformers(gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOPG_HOME", str(tmp_path))  # for the float32 copy
    with LLM(gguf, quant="float32") as llm:
        results = llm.generate(list(PROMPTS), SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True))
    reference = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32).eval()
    for result in results:
        prompt, output = list(result.prompt_token_ids), list(result.token_ids)
        with torch.no_grad():
            logits = reference(input_ids=torch.tensor([prompt + output])).logits[0, len(prompt) - 1 : -1]
        best = torch.topk(logits, 2)
        clear = best.values[:, 0] - best.values[:, 1] >= NEAR_TIE
        compared = int(clear.long().cumprod(0).sum())
        assert output[:compared] == best.indices[:compared, 0].tolist()
        assert compared >= TOKENS // 4


@pytest.mark.model
@pytest.mark.slow
def test_the_demo_names_paris(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What `make demo` shows, with the default recipe."""
    model = pull_catalogue(CATALOGUE["smollm2-135m"], Store(Home.find()), SilentReport())
    monkeypatch.setenv("TOPG_HOME", str(tmp_path))  # for the converted copy
    messages = [
        {"role": "system", "content": "You are a helpful AI assistant."},
        {"role": "user", "content": "What is the capital of France?"},
    ]
    with LLM(model) as llm:
        assert llm.model.manifest.recipe == "int8"
        assert "Paris" in llm.chat(messages, SamplingParams(temperature=0, max_tokens=64)).text
