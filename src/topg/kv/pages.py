"""Bookkeeping of the KV cache: which pages are free, who reads them, and which pages a sequence owns.

A page holds the keys and values of all layers for `tokens_per_page` consecutive tokens of one sequence:

    sequence     | token 0 .. 31 | token 32 .. 63 | token 64 .. |
    page table   |       7       |       2        |      9      |     page ids, any order

Only ids are handled here; the memory itself belongs to a back end.  Nothing in this file is safe for several threads
at once: one loop owns a pool and its tables.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from topg.errors import CapacityError, ConfigError

KVType = Literal["float32", "bfloat16", "int8"]

KV_BYTES: dict[KVType, int] = {"float32": 4, "bfloat16": 2, "int8": 1}
SCALE_BYTES = 4  # int8 has a float32 scale for each key and each value of a head
DEFAULT_PAGE_SIZE = 4_000_000
TOKENS_STEP = 32
DEFAULT_MAX_TOKENS = 64


@dataclass(frozen=True)
class KVGeometry:
    """Shape of a model's KV cache: a page holds keys and values [layers, kv_heads, tokens_per_page, head_dim].

    How they lie there is the back end's business, and so is what it fills them up with; int8 holds each key and value
    of a head as codes with a scale of their own.
    """

    layers: int
    kv_heads: int
    head_dim: int
    dtype: KVType
    tokens_per_page: int

    @property
    def bytes_per_token(self) -> int:
        """Keys and values of all layers for one token."""
        scale = SCALE_BYTES if self.dtype == "int8" else 0
        return self.layers * 2 * self.kv_heads * (self.head_dim * KV_BYTES[self.dtype] + scale)

    @property
    def bytes_per_page(self) -> int:
        return self.bytes_per_token * self.tokens_per_page


def tokens_per_page(bytes_per_token: int, page_size: int | None = None) -> int:
    """Tokens a page of `page_size` bytes holds: the largest multiple of 32 that fits, at least 32.

    None stands for the default of 4 MB, where a page holds at most 64 tokens, so that small models do not waste it.
    """
    if page_size is not None and page_size < 1:
        raise ConfigError(f"memory.page_size is {page_size} bytes; it must be at least 1")
    fitting = (page_size or DEFAULT_PAGE_SIZE) // bytes_per_token // TOKENS_STEP * TOKENS_STEP
    tokens = max(fitting, TOKENS_STEP)
    return min(tokens, DEFAULT_MAX_TOKENS) if page_size is None else tokens


class PageAccountingError(AssertionError):
    """The bookkeeping is broken: a defect of ToPG, never of a request.  The message names the page."""


class PagePool:
    """`page_count` pages with a reader count each.  A page with no reader is free."""

    def __init__(self, page_count: int, tokens_per_page: int) -> None:
        if page_count < 1 or tokens_per_page < 1:
            raise ConfigError(f"a page pool of {page_count} pages of {tokens_per_page} tokens cannot hold anything")
        self.tokens_per_page = tokens_per_page
        self._readers = [0] * page_count
        self._free = list(range(page_count - 1, -1, -1))

    @property
    def page_count(self) -> int:
        return len(self._readers)

    @property
    def free_count(self) -> int:
        return len(self._free)

    @property
    def used_count(self) -> int:
        """Pages with at least one reader; a shared page counts once."""
        return self.page_count - self.free_count

    def pages_for(self, tokens: int) -> int:
        """Pages that `tokens` tokens of one sequence fill.  Changes nothing."""
        return -(-tokens // self.tokens_per_page)

    def allocate(self, count: int) -> tuple[int, ...]:
        """Take `count` free pages, each with the caller as its only reader.

        Raises CapacityError, having changed nothing, when fewer are free.  The ids stay valid until the caller
        releases them.  The pages' contents are whatever was in them before.
        """
        if count > self.free_count:
            raise CapacityError(
                f"{count} KV pages of {self.tokens_per_page} tokens are needed and {self.free_count} of "
                f"{self.page_count} are free; finish or preempt a sequence, or give the KV cache more memory"
            )
        taken = tuple(self._free.pop() for _ in range(count))
        for page in taken:
            self._readers[page] = 1
        return taken

    def share(self, page: int) -> None:
        """Add one reader to a page in use; the new reader must release it too."""
        self._expect_used(page, "shared")
        self._readers[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        """Take one reader off each page; a page without readers is free at once and may be handed out again."""
        for page in pages:
            self._expect_used(page, "released")
            self._readers[page] -= 1
            if self._readers[page] == 0:
                self._free.append(page)

    def readers(self, page: int) -> int:
        """How many readers the page has now.  Changes nothing."""
        return self._readers[page]

    def is_shared(self, page: int) -> bool:
        """Whether the page has more than one reader now, so that nobody may write it.  Changes nothing."""
        return self._readers[page] > 1

    def check(self, tables: Iterable[PageTable]) -> None:
        """Recount all readers from `tables`, which must be every live page table of this pool.  Changes nothing.

        Raises PageAccountingError naming the page that leaked, is owned twice, or is used after its release.
        """
        held: Counter[int] = Counter()
        for table in tables:
            table.check()
            held.update(table.pages)
        self._check_free_list()
        for page, readers in enumerate(self._readers):
            if held[page] != readers:
                raise PageAccountingError(_count_mismatch(page, readers, held[page]))

    def _check_free_list(self) -> None:
        free = Counter(self._free)
        for page, readers in enumerate(self._readers):
            if free[page] != (readers == 0):
                raise PageAccountingError(
                    f"page {page} has {readers} readers and is {free[page]} times in the free list"
                )

    def _expect_used(self, page: int, action: str) -> None:
        if not 0 <= page < self.page_count:
            raise PageAccountingError(f"page {page} was {action}; the pool has pages 0 to {self.page_count - 1}")
        if self._readers[page] == 0:
            raise PageAccountingError(f"page {page} was {action} while it is free (released twice?)")


def _count_mismatch(page: int, readers: int, held: int) -> str:
    if readers == 0:
        return f"page {page} is used after its release: {held} page tables hold it and it is free"
    if held < readers:
        return f"page {page} leaked: it has {readers} readers and {held} page tables hold it"
    return f"page {page} is owned twice: it has {readers} readers and {held} page tables hold it"


class PageTable:
    """The pages of one sequence, in order, and how many tokens they hold.

    Token p lives in `pages[p // tokens_per_page]` at slot `p % tokens_per_page`.
    """

    def __init__(self, pool: PagePool) -> None:
        self._pool = pool
        self._pages: list[int] = []
        self._token_count = 0

    @property
    def pages(self) -> Sequence[int]:
        """The page ids: a view that later calls on this table change; copy it to keep it."""
        return self._pages

    @property
    def token_count(self) -> int:
        return self._token_count

    def pages_needed(self, new_tokens: int) -> int:
        """Free pages that `grow(new_tokens)` and then `writable` on the new tokens take.  Changes nothing.

        Valid until the pool or any table that shares a page with this one changes.
        """
        added = self._pages_to_add(new_tokens)
        return added + len(self._shared_pages(self._token_count, self._token_count + new_tokens))

    def grow(self, new_tokens: int) -> None:
        """Add room for `new_tokens` more tokens and count them.

        Takes pages from the pool; raises CapacityError, having changed nothing, when too few are free.  The last page
        may be shared with a fork: call `writable` before anything is written.
        """
        self._pages += self._pool.allocate(self._pages_to_add(new_tokens))
        self._token_count += new_tokens

    def writable(self, start: int, stop: int) -> tuple[tuple[int, int], ...]:
        """Give this table pages of its own for the tokens from `start` up to `stop` (copy on write).

        Replaces every shared page in that range by a new one and returns the (source, target) copies.  The caller must
        make them before it writes any page and before any other reader of a source lets go of it.  Raises
        CapacityError, having changed nothing, when too few pages are free.  The pages stay writable until the next
        `fork`.
        """
        indices = self._shared_pages(start, stop)
        sources = [self._pages[index] for index in indices]
        targets = self._pool.allocate(len(indices))
        for index, target in zip(indices, targets, strict=True):
            self._pages[index] = target
        self._pool.release(sources)
        return tuple(zip(sources, targets, strict=True))

    def fork(self) -> PageTable:
        """A second sequence with the same tokens: adds a reader to every page and copies nothing.

        The new table is independent and must be released on its own.
        """
        for page in self._pages:
            self._pool.share(page)
        other = PageTable(self._pool)
        other._pages = list(self._pages)
        other._token_count = self._token_count
        return other

    def release(self) -> None:
        """Give all pages back and forget the tokens.  The table is empty then and may grow again."""
        pages, self._pages, self._token_count = self._pages, [], 0
        self._pool.release(pages)

    def check(self) -> None:
        """Raise PageAccountingError when a page appears twice or the pages do not fit the tokens.  Changes nothing."""
        for page, times in Counter(self._pages).items():
            if times > 1:
                raise PageAccountingError(f"page {page} is owned twice: it appears {times} times in one page table")
        if len(self._pages) != self._pool.pages_for(self._token_count):
            raise PageAccountingError(
                f"a page table of {len(self._pages)} pages (first: {self._pages[:1]}) holds {self._token_count} tokens"
            )

    def _pages_to_add(self, new_tokens: int) -> int:
        return self._pool.pages_for(self._token_count + new_tokens) - len(self._pages)

    def _shared_pages(self, start: int, stop: int) -> list[int]:
        """Indices into the table of the shared pages that hold the tokens from `start` up to `stop`."""
        first, end = start // self._pool.tokens_per_page, self._pool.pages_for(stop)
        covered = enumerate(self._pages[first:end], first) if stop > start else ()
        return [index for index, page in covered if self._pool.is_shared(page)]
