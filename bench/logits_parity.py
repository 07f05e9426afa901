"""Largest difference of logits to transformers, in float32, for any Hugging Face checkpoint folder.

    python bench/logits_parity.py FOLDER [FOLDER ...]

Prompts of 1, 31, 32, 33, 64 and 200 random tokens in one step each, and 200 tokens in chunks of 1, 7 and 32.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from topg.backends import load_backend
from topg.backends.base import Backend, SequenceSlice, Step
from topg.converter import ModelConverter
from topg.converter.format import ConvertedModel

LENGTHS = (1, 31, 32, 33, 64, 200)
CHUNKS = (1, 7, 32)
PAGE_TOKENS = 32
PAGES = tuple(range(8))
LIMIT = 1e-3


def logits(backend: Backend, ids: list[int], chunk: int) -> np.ndarray:
    """Logits [len(ids), vocab] with the prompt cut into steps of `chunk` tokens."""
    rows = [
        backend.run(Step((SequenceSlice(ids[start : start + chunk], start, PAGES, "all"),)))
        for start in range(0, len(ids), chunk)
    ]
    return np.concatenate(rows)


def largest_difference(folder: Path, scratch: Path) -> float:
    """Over all lengths, chunks, positions and vocabulary entries."""
    model = ConvertedModel.open(ModelConverter(folder, scratch / "model", "float32").convert())
    backend = load_backend(model, page_count=len(PAGES), tokens_per_page=PAGE_TOKENS, kv_dtype="float32")
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    ids = np.random.default_rng(0).integers(3, min(256, model.plan.vocab), max(LENGTHS)).tolist()
    with torch.no_grad():
        expected = reference(input_ids=torch.tensor([ids]), use_cache=False).logits[0].numpy()
    whole = (np.abs(logits(backend, ids[:length], length) - expected[:length]).max() for length in LENGTHS)
    cut = (np.abs(logits(backend, ids, chunk) - expected).max() for chunk in CHUNKS)
    return float(max(*whole, *cut))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", type=Path, nargs="+")
    worst = 0.0
    for folder in parser.parse_args().folders:
        with tempfile.TemporaryDirectory() as scratch:
            difference = largest_difference(folder, Path(scratch))
        print(f"{folder.name:34} {difference:.2e}", flush=True)
        worst = max(worst, difference)
    print(f"largest of all {worst:.2e}; the limit is {LIMIT:g}")
    return 0 if worst <= LIMIT else 1


if __name__ == "__main__":
    sys.exit(main())
