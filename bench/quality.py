"""What each recipe costs in quality: perplexity, KL divergence and top-1 agreement against float32.

    python bench/quality.py MODEL.gguf [--tokens 20480] [--window 512] [--candidates int8 int8+int8 keep ...]

A candidate is a recipe, or RECIPE+TYPE with the number type of the KV cache.  The reference is transformers in float32
on the same (dequantised) file, or with `--reference topg` the float32 recipe, which is faster and agrees with
transformers to 1e-4 (bench/logits_parity.py).  The text is the Python library's own documentation
(`pydoc_data.topics`), cut into windows.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any, cast, get_args

import numpy as np
import numpy.typing as npt

from topg.backends import load_backend
from topg.backends.base import Backend, SequenceSlice, Step
from topg.converter import ModelConverter
from topg.converter.format import ConvertedModel
from topg.kv.pages import KVType
from topg.precision.recipes import RECIPE_NAMES
from topg.tokenizer.tokenizer import Tokenizer

FloatArray = npt.NDArray[Any]
Forward = Callable[[list[int]], FloatArray]

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

    def add(self, reference: FloatArray, logits: FloatArray, targets: FloatArray) -> None:
        """Logits [positions, vocab] of both sides; targets [positions - 1] are the tokens that followed."""
        theirs, ours = log_softmax(reference), log_softmax(logits)
        self.kl.append(np.einsum("ij,ij->i", np.exp(theirs), theirs - ours))
        self.nll -= float(ours[np.arange(len(targets)), targets].sum(dtype=np.float64))
        self.agree += int((ours.argmax(-1) == theirs.argmax(-1)).sum())
        self.positions += len(ours)

    def row(self, name: str, megabytes: float, windows: int) -> str:
        kl = np.concatenate(self.kl)
        perplexity = np.exp(self.nll / (self.positions - windows))
        return (
            f"| {name} | {megabytes:.0f} | {perplexity:.3f} | {kl.mean():.5f} | {np.quantile(kl, 0.99):.4f} "
            f"| {100 * self.agree / self.positions:.2f} % |"
        )


def log_softmax(logits: FloatArray) -> FloatArray:
    shifted = logits - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def windows(tokenizer: Tokenizer, tokens: int, window: int) -> Iterator[list[int]]:
    """Consecutive windows of the library's documentation."""
    text = "\n\n".join(topics[name] for name in sorted(topics))
    ids = tokenizer.encode(text[: tokens * 8], add_bos=False, parse_special=False)
    bos = [tokenizer.tokens.bos] if tokenizer.tokens.add_bos and tokenizer.tokens.bos is not None else []
    for index in range(tokens // window):
        yield bos + ids[index * window : (index + 1) * window - len(bos)]


def forward(backend: Backend, ids: list[int]) -> FloatArray:
    """Logits of all tokens, computed in steps of CHUNK."""
    pages = tuple(range(-(-len(ids) // PAGE_TOKENS)))
    rows = [
        backend.run(Step((SequenceSlice(ids[start : start + CHUNK], start, pages, "all"),)))
        for start in range(0, len(ids), CHUNK)
    ]
    return np.concatenate(rows)


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


def transformers_forward(source: Path) -> Forward:
    """Logits of a text by transformers in float32."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.float32).eval()

    def run(ids: list[int]) -> FloatArray:
        with torch.no_grad():
            return model(input_ids=torch.tensor([ids])).logits[0].float().numpy()

    return run


def compare(reference: Forward, loaded: dict[Candidate, Backend], texts: Iterator[list[int]]) -> list[Score]:
    """Scores of the reference against itself, then of every candidate."""
    scores = [Score() for _ in range(1 + len(loaded))]
    for ids in texts:
        targets = np.array(ids[1:])
        expected = reference(ids)
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
    parser.add_argument("--reference", choices=("transformers", "topg"), default="transformers")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        loaded = {
            candidate: load(arguments.model, candidate, Path(folder), arguments.window)
            for candidate in arguments.candidates
        }
        if arguments.reference == "transformers":
            reference = transformers_forward(arguments.model)
        else:
            exact, _, _ = load(arguments.model, Candidate("float32", "float32"), Path(folder), arguments.window)
            reference = partial(forward, exact)
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
