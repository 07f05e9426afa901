"""Drives a back end token by token or chunk by chunk, with page tables in a shuffled order."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from topg.backends.base import Backend, SequenceSlice, Step

FloatArray = npt.NDArray[np.float32]


def shuffled_tables(page_count: int, lengths: Sequence[int], tokens_per_page: int, seed: int = 0) -> list[list[int]]:
    """A page table for each length, of pages in random order that no other table uses."""
    order = np.random.default_rng(seed).permutation(page_count).tolist()
    tables = []
    for length in lengths:
        needed = -(-length // tokens_per_page)
        tables.append(order[:needed])
        order = order[needed:]
    return tables


def run_chunks(backend: Backend, tokens: Sequence[int], pages: Sequence[int], chunk: int) -> FloatArray:
    """Logits [tokens, vocab] of one sequence alone, `chunk` tokens a step."""
    parts = [
        backend.run(Step((SequenceSlice(tokens[start : start + chunk], start, pages, "all"),)))
        for start in range(0, len(tokens), chunk)
    ]
    return np.concatenate(parts)


def run_mixed(
    backend: Backend, sequences: Sequence[Sequence[int]], tables: Sequence[Sequence[int]], chunks: Sequence[int]
) -> list[FloatArray]:
    """Logits of every token of all sequences, run side by side with a chunk size for each."""
    done = [0] * len(sequences)
    parts: list[list[FloatArray]] = [[] for _ in sequences]
    while any(start < len(tokens) for start, tokens in zip(done, sequences, strict=True)):
        active = [i for i, tokens in enumerate(sequences) if done[i] < len(tokens)]
        slices = [SequenceSlice(sequences[i][done[i] : done[i] + chunks[i]], done[i], tables[i], "all") for i in active]
        logits = backend.run(Step(tuple(slices)))
        for i, part in zip(active, slices, strict=True):
            parts[i].append(logits[: len(part.tokens)])
            logits = logits[len(part.tokens) :]
            done[i] += len(part.tokens)
    return [np.concatenate(rows) for rows in parts]
