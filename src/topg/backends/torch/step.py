"""A step, flattened to rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor

from topg.backends.base import SequenceSlice, Step


@dataclass(frozen=True, eq=False)
class Rows:
    """The new tokens of a step, slice after slice, one row each.

    tokens, pages, slots  int64 [rows]: token id, and the page and slot its key and value are written to
    positions             place of each row's token in its sequence
    selected              int64: the rows logits are wanted for, ascending
    slices                each slice with its rows
    """

    tokens: Tensor
    pages: Tensor
    slots: Tensor
    positions: tuple[int, ...]
    selected: Tensor
    slices: tuple[tuple[SequenceSlice, slice], ...]


def flatten(step: Step, tokens_per_page: int, device: torch.device) -> Rows:
    """The rows of a step that `check_step` accepted."""
    slices = tuple(_with_rows(step))
    positions = tuple(part.start + i for part in step.slices for i in range(len(part.tokens)))
    pages = [part.pages[(part.start + i) // tokens_per_page] for part in step.slices for i in range(len(part.tokens))]
    return Rows(
        tokens=_index(list(chain.from_iterable(part.tokens for part in step.slices)), device),
        pages=_index(pages, device),
        slots=_index([position % tokens_per_page for position in positions], device),
        positions=positions,
        selected=_index([row for part, rows in slices for row in _wanted(part, rows)], device),
        slices=slices,
    )


def _with_rows(step: Step) -> Iterator[tuple[SequenceSlice, slice]]:
    first = 0
    for part in step.slices:
        yield part, slice(first, first + len(part.tokens))
        first += len(part.tokens)


def _wanted(part: SequenceSlice, rows: slice) -> range:
    first = {"none": rows.stop, "last": rows.stop - 1, "all": rows.start}[part.logits]
    return range(first, rows.stop)


def _index(values: Sequence[int], device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.int64, device=device)
