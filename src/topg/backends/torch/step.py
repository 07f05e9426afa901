"""A step, checked and flattened to rows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import get_args

import torch
from torch import Tensor

from topg.backends.base import LogitsWanted, SequenceSlice, Step
from topg.errors import RequestError
from topg.kv.pages import PageAccountingError


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


def check_step(step: Step, *, vocab: int, page_count: int, tokens_per_page: int) -> None:
    """Refuse a step that would read or write outside its own pages.

    Raises RequestError for tokens that are no tokens of the model, and PageAccountingError for page tables that are
    too short, name pages that do not exist, or let two sequences meet in a page that one of them writes.
    """
    if not step.slices:
        raise RequestError("the step has no slices; a step computes at least one token")
    for part in step.slices:
        _check_slice(part, vocab, page_count, tokens_per_page)
    _check_written_pages(step, tokens_per_page)


def _check_slice(part: SequenceSlice, vocab: int, page_count: int, tokens_per_page: int) -> None:
    if not part.tokens or part.start < 0:
        raise RequestError(
            f"a slice has {len(part.tokens)} tokens from position {part.start}; "
            "it needs at least one token and a position of at least 0"
        )
    if part.logits not in get_args(LogitsWanted):
        raise RequestError(f"logits are wanted for {part.logits!r}; allowed: {', '.join(get_args(LogitsWanted))}")
    wrong = [token for token in part.tokens if not 0 <= token < vocab]
    if wrong:
        raise RequestError(f"token id {wrong[0]} does not exist; the model has ids 0 to {vocab - 1}")
    room, needed = len(part.pages) * tokens_per_page, part.start + len(part.tokens)
    if room < needed:
        raise PageAccountingError(f"a page table of {len(part.pages)} pages has room for {room} of {needed} tokens")
    for page in part.pages:
        if not 0 <= page < page_count:
            raise PageAccountingError(f"a page table names page {page}; the pool has pages 0 to {page_count - 1}")


def _check_written_pages(step: Step, tokens_per_page: int) -> None:
    holders = Counter(page for part in step.slices for page in _pages(part, 0, tokens_per_page))
    for part in step.slices:
        for page in _pages(part, part.start, tokens_per_page):
            if holders[page] > 1:
                raise PageAccountingError(
                    f"page {page} is written by a slice of the step and appears {holders[page]} times in its page "
                    "tables; a page with other readers must be copied before it is written"
                )


def _pages(part: SequenceSlice, start: int, tokens_per_page: int) -> Sequence[int]:
    """Pages that hold the slice's tokens from position `start` to its end."""
    end = part.start + len(part.tokens)
    return part.pages[start // tokens_per_page : -(-end // tokens_per_page)]


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
