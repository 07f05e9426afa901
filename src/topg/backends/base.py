"""What a back end is asked to do: one ragged step at a time.

A step is any mix of sequences, each with any number of new tokens: there is no prefill and no decode.  A back end
appends the new tokens' keys and values to the pages named by each sequence's page table, and returns logits for the
rows that were asked for.  A row's result depends on its own sequence alone, bit for bit: not on the other sequences of
the step, and not on how its prompt was cut into steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt

from topg.kv.pages import KVGeometry
from topg.plan import Plan

LogitsWanted = Literal["none", "last", "all"]


@dataclass(frozen=True)
class SequenceSlice:
    """One sequence's share of a step.

    tokens  ids of the new tokens
    start   tokens of this sequence already in its pages; the first new token stands at this position
    pages   the sequence's page table, in order, long enough for start + len(tokens) tokens; token p lives in
            pages[p // tokens_per_page] at slot p % tokens_per_page
    logits  for which of the new tokens logits are returned
    """

    tokens: Sequence[int]
    start: int
    pages: Sequence[int]
    logits: LogitsWanted = "last"


@dataclass(frozen=True)
class Step:
    """What one call of a back end computes."""

    slices: tuple[SequenceSlice, ...]

    @property
    def token_count(self) -> int:
        return sum(len(part.tokens) for part in self.slices)


class Backend(Protocol):
    """A loaded model on one device, with its KV page pool."""

    @property
    def plan(self) -> Plan:
        """The plan it runs."""

    @property
    def kv(self) -> KVGeometry:
        """Shape of its KV cache."""

    def run(self, step: Step) -> npt.NDArray[np.float32]:
        """Compute a step; returns logits [rows asked for, vocab], rows in the order of slices and tokens.

        Writes the pages at the new tokens' slots and no other memory that outlives the call.  The result stays valid.
        """

    def copy_page(self, source: int, target: int) -> None:
        """Copy all layers of a page (copy on write)."""
