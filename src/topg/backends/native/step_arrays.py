"""A step as the flat arrays that the native engine takes, in pieces that it has room for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate, chain
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from topg.backends.base import LogitsWanted, SequenceSlice, Step
from topg.backends.checks import WANTED

Int32 = npt.NDArray[np.int32]

_WANTED_CODES = {wanted: code for code, wanted in enumerate(WANTED)}


class StepArrays(NamedTuple):
    """One entry a slice; tokens and page tables stand one after the other.

    page_offsets  where each slice's page table begins in `pages`, and where the last one ends
    wanted        the place of the slice's `logits` in WANTED
    """

    tokens: Int32
    starts: Int32
    counts: Int32
    page_offsets: Int32
    pages: Int32
    wanted: npt.NDArray[np.uint8]


def step_arrays(step: Step) -> StepArrays:
    parts = step.slices
    return StepArrays(
        np.fromiter(chain.from_iterable(part.tokens for part in parts), np.int32),
        np.array([part.start for part in parts], np.int32),
        np.array([len(part.tokens) for part in parts], np.int32),
        np.fromiter(accumulate((len(part.pages) for part in parts), initial=0), np.int32),
        np.fromiter(chain.from_iterable(part.pages for part in parts), np.int32),
        np.array([_WANTED_CODES[part.logits] for part in parts], np.uint8),
    )


def rows_end(step: Step) -> int:
    """The position after the last one of a step."""
    return max(part.start + len(part.tokens) for part in step.slices)


def wanted_rows(step: Step) -> int:
    """Rows of a step whose logits are wanted."""
    return sum(len(part.tokens) if part.logits == "all" else part.logits == "last" for part in step.slices)


def cut(step: Step, rows: int) -> Sequence[Step]:
    """The step as steps of at most `rows` tokens, whose logits follow one another as the step's do."""
    if step.token_count <= rows:
        return [step]
    steps: list[list[SequenceSlice]] = [[]]
    room = rows
    for part in step.slices:
        for piece in _pieces(part, room, rows):
            if room == 0:
                steps.append([])
                room = rows
            steps[-1].append(piece)
            room -= len(piece.tokens)
    return [Step(tuple(slices)) for slices in steps]


def _pieces(part: SequenceSlice, room: int, rows: int) -> Iterator[SequenceSlice]:
    """A slice cut so that the first piece fits `room` (or `rows`, where there is none), the others `rows`."""
    start, count = 0, len(part.tokens)
    while start < count:
        stop = min(count, start + (room or rows))
        wanted: LogitsWanted = part.logits if stop == count or part.logits == "all" else "none"
        yield SequenceSlice(part.tokens[start:stop], part.start + start, part.pages, wanted)
        start, room = stop, rows
