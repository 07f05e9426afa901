"""Checks that every back end makes: of a plan's KV cache, and of each step before anything is written."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import get_args

from topg.backends.base import LogitsWanted, SequenceSlice, Step
from topg.errors import BackendError, RequestError
from topg.kv.pages import KVGeometry, KVType, PageAccountingError
from topg.ops import Embed
from topg.plan import Plan

WANTED: tuple[LogitsWanted, ...] = get_args(LogitsWanted)


def kv_geometry(plan: Plan, dtype: KVType, tokens_per_page: int) -> KVGeometry:
    """Shape of the plan's KV cache; raises BackendError when its layers differ or the type is unknown."""
    if dtype not in get_args(KVType):
        raise BackendError(f"the KV cache cannot be kept in {dtype!r}; allowed: {', '.join(get_args(KVType))}")
    layers = [op.layer for op in plan.attention]
    shapes = {(op.kv_heads, op.head_dim) for op in plan.attention}
    if sorted(layers) != list(range(len(layers))) or len(shapes) != 1:
        raise BackendError(
            f"the plan's attention layers are {layers} with (KV heads, head size) {sorted(shapes)}; "
            "pages need layers numbered from 0, all of one shape"
        )
    kv_heads, head_dim = shapes.pop()
    return KVGeometry(len(layers), kv_heads, head_dim, dtype, tokens_per_page)


def token_ids(plan: Plan) -> int:
    """Number of token ids every embedding of the plan knows."""
    return min((op.vocab for op in plan.ops if isinstance(op, Embed)), default=plan.vocab)


def check_page(page: int, page_count: int) -> None:
    """Raise PageAccountingError unless a page to be copied exists."""
    if not 0 <= page < page_count:
        raise PageAccountingError(f"page {page} cannot be copied; the pool has {page_count} pages")


def check_step(step: Step, *, vocab: int, page_count: int, tokens_per_page: int) -> None:
    """Refuse a step that would read or write outside its own pages.

    Raises RequestError for tokens that are no tokens of the model, and PageAccountingError for page tables that are
    too short, name pages that do not exist, or let two sequences meet in a page that one of them writes.
    """
    if not step.slices:
        raise RequestError("the step has no slices; a step computes at least one token")
    for part in step.slices:
        _check_slice(part, tokens_per_page)
    _check_tokens([token for part in step.slices for token in part.tokens], vocab)
    pages = [page for part in step.slices for page in _pages(part, 0, tokens_per_page)]
    for page in (min(pages), max(pages)):
        if not 0 <= page < page_count:
            raise PageAccountingError(f"a page table names page {page}; the pool has pages 0 to {page_count - 1}")
    if len(set(pages)) != len(pages):
        _check_shared_pages(step, Counter(pages), tokens_per_page)


def _check_slice(part: SequenceSlice, tokens_per_page: int) -> None:
    count = len(part.tokens)
    if not count or part.start < 0:
        raise RequestError(
            f"a slice has {count} tokens from position {part.start}; "
            "it needs at least one token and a position of at least 0"
        )
    if part.logits not in WANTED:
        raise RequestError(f"logits are wanted for {part.logits!r}; allowed: {', '.join(WANTED)}")
    room, needed = len(part.pages) * tokens_per_page, part.start + count
    if room < needed:
        raise PageAccountingError(f"a page table of {len(part.pages)} pages has room for {room} of {needed} tokens")


def _check_tokens(tokens: Sequence[int], vocab: int) -> None:
    for token in (min(tokens), max(tokens)):
        if not 0 <= token < vocab:
            raise RequestError(f"token id {token} does not exist; the model has ids 0 to {vocab - 1}")


def _check_shared_pages(step: Step, holders: Mapping[int, int], tokens_per_page: int) -> None:
    """`holders` counts how often each page stands in the page tables of the step."""
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
