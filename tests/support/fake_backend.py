"""A back end without a model: scripted logits, and a log of what it was asked to compute.

It keeps what a real one would: the tokens in its pages.  Reading a page table gives back the sequence so far, so that a
wrong start, a wrong page or a page of somebody else changes the answer or raises.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from topg.backends.base import SequenceSlice, Step
from topg.errors import ComputeError
from topg.kv.pages import KVGeometry
from topg.plan import Plan, PlanBuilder
from topg.sampling import Sampled, SamplerState, sample

Floats = npt.NDArray[np.float32]
Script = Callable[[Sequence[int]], Floats]


class FakeBackend:
    """`script(tokens so far)` gives the logits after them; `on_run` is called before every step and may raise."""

    def __init__(
        self, script: Script, vocab: int, pages: int, tokens_per_page: int = 4,
        on_run: Callable[[Step], None] | None = None,
    ) -> None:  # fmt: skip
        self.plan = _plan(vocab)
        self.kv = KVGeometry(1, 1, 1, "float32", tokens_per_page)
        self.steps: list[Step] = []
        self._script = script
        self._on_run = on_run
        self._slots = np.full((pages, tokens_per_page), -1)

    def run(self, step: Step) -> Floats:
        self.steps.append(step)
        if self._on_run is not None:
            self._on_run(step)
        written = [self._write(part) for part in step.slices]
        wanted = [tokens for part, tokens in zip(step.slices, written, strict=True) if part.logits == "last"]
        rows = [self._script(tokens) for tokens in wanted]
        return np.array(rows, np.float32).reshape(len(rows), self.plan.vocab)

    def run_and_sample(self, step: Step, states: Sequence[SamplerState]) -> list[Sampled | ComputeError]:
        return sample(self.run(step), states)

    def copy_page(self, source: int, target: int) -> None:
        self._slots[target] = self._slots[source]

    def _write(self, part: SequenceSlice) -> list[int]:
        """Store the new tokens; returns all tokens of the sequence as its pages hold them."""
        stop = part.start + len(part.tokens)
        places = [(part.pages[p // self.kv.tokens_per_page], p % self.kv.tokens_per_page) for p in range(stop)]
        for place, token in zip(places[part.start :], part.tokens, strict=True):
            self._slots[place] = token
        return [int(self._slots[place]) for place in places]


def successor_script(vocab: int, successor: Callable[[int], int]) -> Script:
    """The last token alone decides the next one, by a wide margin."""

    def script(tokens: Sequence[int]) -> Floats:
        logits = np.zeros(vocab, np.float32)
        logits[successor(tokens[-1])] = 10.0
        return logits

    return script


def hashing_script(vocab: int) -> Script:
    """Logits that depend on every token so far and on their order."""

    def script(tokens: Sequence[int]) -> Floats:
        return np.random.default_rng(list(tokens)).standard_normal(vocab).astype(np.float32) * 3

    return script


def _plan(vocab: int) -> Plan:
    builder = PlanBuilder()
    builder.embed("embedding", vocab, 1)
    builder.logits("x", "head", vocab)
    return builder.build()
