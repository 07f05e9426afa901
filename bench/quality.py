"""What each recipe costs in quality: perplexity, KL divergence and top-1 agreement against float32.

    python bench/quality.py MODEL.gguf [--tokens 20480] [--window 512] [--candidates int8 int8+int8 keep ...]

A candidate is a recipe, or RECIPE+TYPE with the number type of the KV cache.  The reference is transformers in float32
on the same (dequantised) file.  The text is the Python library's own documentation (`pydoc_data.topics`), cut into
windows.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from pydoc_data.topics import topics
from typing import cast, get_args

import numpy as np
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from topg.backends import load_backend
from topg.backends.base import Backend, SequenceSlice, Step
from topg.converter import ModelConverter
from topg.converter.format import ConvertedModel
from topg.kv.pages import KVType
from topg.precision.recipes import RECIPE_NAMES
from topg.tokenizer.tokenizer import Tokenizer

PAGE_TOKENS = 64
CHUNK = 512


@dataclass(frozen=True)
class Candidate:
    """A recipe and the number type of its KV cache."""

    recipe: str
    kv_dtype: KVType

    @classmethod
    def parse(cls, text: str) -> Candidate:
        recipe, _, kv_dtype = text.partition("+")
        if recipe not in RECIPE_NAMES or kv_dtype not in ("", *get_args(KVType)):
            raise argparse.ArgumentTypeError(
                f"{text!r} is not RECIPE or RECIPE+TYPE; recipes: {', '.join(RECIPE_NAMES)}; "
                f"types: {', '.join(get_args(KVType))}"
            )
        default: KVType = "float32" if recipe == "float32" else "bfloat16"
        return cls(recipe, cast(KVType, kv_dtype) if kv_dtype else default)

    def __str__(self) -> str:
        return f"{self.recipe}, {self.kv_dtype} cache"


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


def windows(tokenizer: Tokenizer, tokens: int, window: int) -> Iterator[list[int]]:
    """Consecutive windows of the library's documentation."""
    text = "\n\n".join(topics[name] for name in sorted(topics))
    ids = tokenizer.encode(text[: tokens * 8], add_bos=False, parse_special=False)
    bos = [tokenizer.tokens.bos] if tokenizer.tokens.add_bos and tokenizer.tokens.bos is not None else []
    for index in range(tokens // window):
        yield bos + ids[index * window : (index + 1) * window - len(bos)]


def forward(backend: Backend, ids: list[int]) -> torch.Tensor:
    """Logits of all tokens, computed in steps of CHUNK."""
    pages = tuple(range(-(-len(ids) // PAGE_TOKENS)))
    rows = [
        backend.run(Step((SequenceSlice(ids[start : start + CHUNK], start, pages, "all"),)))
        for start in range(0, len(ids), CHUNK)
    ]
    return torch.from_numpy(np.concatenate(rows))


def load(source: Path, candidate: Candidate, folder: Path, window: int) -> tuple[Backend, float, ConvertedModel]:
    """A back end for the candidate, the megabytes of its weights, and the converted model."""
    target = folder / candidate.recipe
    if not target.exists():
        ModelConverter(source, target, candidate.recipe).convert()
    model = ConvertedModel.open(target)
    backend = load_backend(
        model, page_count=-(-window // PAGE_TOKENS), tokens_per_page=PAGE_TOKENS, kv_dtype=candidate.kv_dtype
    )
    return backend, sum(path.stat().st_size for path in target.glob("*.safetensors")) / 1e6, model


def compare(reference: PreTrainedModel, loaded: dict[Candidate, Backend], texts: Iterator[list[int]]) -> list[Score]:
    """Scores of the reference against itself, then of every candidate."""
    scores = [Score() for _ in range(1 + len(loaded))]
    for ids in texts:
        targets = torch.tensor(ids[1:])
        with torch.no_grad():
            expected = reference(input_ids=torch.tensor([ids])).logits[0].float()
        scores[0].add(expected, expected, targets)
        for score, backend in zip(scores[1:], loaded.values(), strict=True):
            score.add(expected, forward(backend, ids), targets)
    return scores


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--tokens", type=int, default=20_480)
    parser.add_argument("--window", type=int, default=512)
    parser.add_argument("--candidates", nargs="+", type=Candidate.parse, metavar="RECIPE[+TYPE]",
                        default=[Candidate.parse(recipe) for recipe in RECIPE_NAMES])  # fmt: skip
    arguments = parser.parse_args()
    reference = AutoModelForCausalLM.from_pretrained(
        arguments.model.parent, gguf_file=arguments.model.name, dtype=torch.float32
    ).eval()
    with tempfile.TemporaryDirectory() as folder:
        loaded = {
            candidate: load(arguments.model, candidate, Path(folder), arguments.window)
            for candidate in arguments.candidates
        }
        tokenizer = next(iter(loaded.values()))[2].load_tokenizer()
        texts = windows(tokenizer, arguments.tokens, arguments.window)
        baseline, *scores = compare(reference, {name: entry[0] for name, entry in loaded.items()}, texts)
        count = arguments.tokens // arguments.window
        perplexity = np.exp(baseline.nll / (baseline.positions - count))
        print(f"{baseline.positions:,} positions; reference perplexity {perplexity:.3f}\n")
        print("| recipe | MB | perplexity | KL mean | KL p99 | top-1 |\n|---|---|---|---|---|---|")
        for score, (candidate, (_, megabytes, _)) in zip(scores, loaded.items(), strict=True):
            print(score.row(str(candidate), megabytes, count))


if __name__ == "__main__":
    main()
