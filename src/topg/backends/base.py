"""What a back end is asked to do: one ragged step at a time.

A step is any mix of sequences, each with any number of new tokens: there is no prefill and no decode.  A back end
appends the new tokens' keys and values to the pages named by each sequence's page table, and returns logits for the
rows that were asked for.  A row's result depends on its own sequence alone, bit for bit: not on the other sequences of
the step, and not on how its prompt was cut into steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol, TypedDict

import numpy as np
import numpy.typing as npt

from topg.errors import ComputeError
from topg.kv.pages import KVGeometry, KVType
from topg.plan import Plan
from topg.precision.formats import Precision
from topg.sampling import Sampled, SamplerState

if TYPE_CHECKING:
    from typing_extensions import Required  # in `typing` from 3.11

BackendName = Literal["native", "torch"]
LogitsWanted = Literal["none", "last", "all"]


class SequenceSlice(NamedTuple):
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


class BackendOptions(TypedDict, total=False):
    """How a back end is loaded; what is left out is as the back end's own default.

    page_count, tokens_per_page, kv_dtype  size and number type of the pool of KV pages
    device           "cpu", or a torch device such as "cuda"
    threads          threads of the CPU
    flash_attention  compute attention in blocks with a running softmax
    """

    page_count: Required[int]
    tokens_per_page: Required[int]
    kv_dtype: KVType
    device: str
    threads: int | None
    flash_attention: bool


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

    def run_and_sample(self, step: Step, states: Sequence[SamplerState]) -> list[Sampled | ComputeError]:
        """Compute a step and draw from each row of its logits, in order; states[i] belongs to row i.

        A row without usable numbers gives a ComputeError in its place.  States are read, not changed.
        """

    def copy_page(self, source: int, target: int) -> None:
        """Copy all layers of a page (copy on write)."""


class BackendType(Protocol):
    """What can be asked of a back end before a model is loaded into it."""

    def resident_bytes(self, precision: Precision, shape: tuple[int, ...]) -> int:
        """Memory that a tensor takes once it is loaded; more than its file where codes are unpacked."""

    def page_bytes(self, kv: KVGeometry) -> int:
        """Memory of a page of the KV cache, with what it is filled up by."""

    def device_memory(self, device: str) -> int | None:
        """Free bytes of a device that has a memory of its own; None for one that uses the host's."""
