"""Runs a converted model step by step, as a test wants it cut."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from topg.backends import load_backend
from topg.backends.base import SequenceSlice, Step
from topg.config import BackendChoice
from topg.converter.format import ConvertedModel
from topg.kv.pages import KVType

PAGE_TOKENS = 32


class Runner:
    """One sequence at a time over a small page pool whose pages are handed out of order."""

    def __init__(
        self, folder: Path, kv_dtype: KVType = "bfloat16", pages: int = 8, backend: BackendChoice = "auto"
    ) -> None:
        self.backend = load_backend(
            ConvertedModel.open(folder), backend, page_count=pages, tokens_per_page=PAGE_TOKENS, kv_dtype=kv_dtype
        )
        self._pages = tuple(int(page) for page in np.random.default_rng(0).permutation(pages))

    def logits(self, ids: list[int], chunk: int | None = None) -> np.ndarray:
        """Logits [len(ids), vocab], the prompt cut into steps of `chunk` tokens (None: one step)."""
        chunk = chunk or len(ids)
        rows = [
            self.backend.run(Step((SequenceSlice(ids[start : start + chunk], start, self._pages, "all"),)))
            for start in range(0, len(ids), chunk)
        ]
        return np.concatenate(rows)
