"""What each recipe costs in quality: perplexity, KL divergence and top-1 agreement against float32.

    python bench/quality.py MODEL.gguf [--tokens 20480] [--recipes int8 keep ...]

The reference is transformers in float32 on the same (dequantised) file.  The text is the Python library's own
documentation (`pydoc_data.topics`), cut into windows of 512 tokens.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from pydoc_data.topics import topics

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from topg.backends import load_backend
from topg.backends.base import Backend, SequenceSlice, Step
from topg.converter import ModelConverter
from topg.converter.format import ConvertedModel
from topg.precision.recipes import RECIPE_NAMES
from topg.tokenizer.tokenizer import Tokenizer

WINDOW = 512
PAGE_TOKENS = 64


@dataclass
class Score:
    """Sums over positions for one recipe."""

    nll: float = 0.0
    kl: list[np.ndarray] = field(default_factory=list)
    agree: int = 0
    positions: int = 0

    def add(self, reference: torch.Tensor, logits: torch.Tensor, targets: torch.Tensor) -> None:
        """Log-probabilities [positions, vocab] of both sides; targets [positions - 1] are the tokens that followed."""
        ours, theirs = torch.log_softmax(logits, -1), torch.log_softmax(reference, -1)
        self.kl.append((theirs.exp() * (theirs - ours)).sum(-1).numpy())
        self.nll -= float(ours[:-1].gather(1, targets[:, None]).sum())
        self.agree += int((ours.argmax(-1) == theirs.argmax(-1)).sum())
        self.positions += len(ours)

    def row(self, name: str, megabytes: float, windows: int) -> str:
        kl = np.concatenate(self.kl)
        perplexity = np.exp(self.nll / (self.positions - windows))
        return (
            f"| {name} | {megabytes:.0f} | {perplexity:.3f} | {kl.mean():.5f} | {np.quantile(kl, 0.99):.4f} "
            f"| {100 * self.agree / self.positions:.2f} % |"
        )


def windows(tokenizer: Tokenizer, tokens: int) -> Iterator[list[int]]:
    """Consecutive windows of the library's documentation."""
    text = "\n\n".join(topics[name] for name in sorted(topics))
    ids = tokenizer.encode(text[: tokens * 8], add_bos=False, parse_special=False)
    bos = [tokenizer.tokens.bos] if tokenizer.tokens.add_bos and tokenizer.tokens.bos is not None else []
    for index in range(tokens // WINDOW):
        yield bos + ids[index * WINDOW : (index + 1) * WINDOW - len(bos)]


def forward(backend: Backend, ids: list[int]) -> torch.Tensor:
    pages = range(WINDOW // PAGE_TOKENS)
    return torch.from_numpy(backend.run(Step((SequenceSlice(ids, 0, tuple(pages), "all"),))))


def load(source: Path, recipe: str, folder: Path) -> tuple[Backend, float, ConvertedModel]:
    model = ConvertedModel.open(ModelConverter(source, folder / recipe, recipe).convert())
    backend = load_backend(
        model, page_count=WINDOW // PAGE_TOKENS, tokens_per_page=PAGE_TOKENS,
        kv_dtype="float32" if recipe == "float32" else "bfloat16",
    )  # fmt: skip
    size = sum(path.stat().st_size for path in (folder / recipe).glob("*.safetensors"))
    return backend, size / 1e6, model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--tokens", type=int, default=40 * WINDOW)
    parser.add_argument("--recipes", nargs="+", default=list(RECIPE_NAMES), choices=RECIPE_NAMES)
    arguments = parser.parse_args()
    reference = AutoModelForCausalLM.from_pretrained(
        arguments.model.parent, gguf_file=arguments.model.name, dtype=torch.float32
    ).eval()
    with tempfile.TemporaryDirectory() as folder:
        loaded = {recipe: load(arguments.model, recipe, Path(folder)) for recipe in arguments.recipes}
        model = next(iter(loaded.values()))[2]
        tokenizer = model.load_tokenizer()
        scores = {recipe: Score() for recipe in loaded}
        baseline = Score()
        count = 0
        for ids in windows(tokenizer, arguments.tokens):
            targets = torch.tensor(ids[1:])
            with torch.no_grad():
                expected = reference(input_ids=torch.tensor([ids])).logits[0].float()
            baseline.add(expected, expected, targets)
            for recipe, (backend, _, _) in loaded.items():
                scores[recipe].add(expected, forward(backend, ids), targets)
            count += 1
        perplexity = np.exp(baseline.nll / (baseline.positions - count))
        print(f"{baseline.positions:,} positions; reference perplexity {perplexity:.3f}\n")
        print("| recipe | MB | perplexity | KL mean | KL p99 | top-1 |\n|---|---|---|---|---|---|")
        for recipe, score in scores.items():
            print(score.row(recipe, loaded[recipe][1], count))


if __name__ == "__main__":
    main()
