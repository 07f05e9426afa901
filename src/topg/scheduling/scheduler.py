"""The scheduler: continuous batching over a pool of KV pages, first come, first served.

A sequence is two numbers: `known` tokens (prompt and generated so far) and `computed` tokens, which catch up with them
in steps.  There is no prefill and no decode phase:

    tokens       | prompt ....................... | generated .. |
                 0            computed                         known        prompt + max_tokens
                 | in KV pages  | to be computed, in chunks      |

A sequence is admitted when pages for its worst case (prompt and `max_tokens`) are free, and keeps them to its end: an
admitted sequence never waits for memory.  The head of the queue is not overtaken.

The owner calls `schedule`, computes the step, and then calls `commit` (or `abandon`, when the step failed).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from topg.errors import CapacityError, ConfigError
from topg.kv.pages import PagePool, PageTable


@dataclass(frozen=True)
class SchedulerLimits:
    """Bounds of the scheduler.

    max_batch_size  sequences that run at the same time
    token_budget    tokens a step computes at most; every running sequence must get at least one
    max_waiting     requests that wait at the same time
    """

    max_batch_size: int = 16
    token_budget: int = 512
    max_waiting: int = 1024

    def __post_init__(self) -> None:
        if self.max_batch_size < 1 or self.max_waiting < 1:
            raise ConfigError(
                f"max_batch_size is {self.max_batch_size} and max_waiting {self.max_waiting}; both must be at least 1"
            )
        if self.token_budget < self.max_batch_size:
            raise ConfigError(
                f"prefill_chunk (tokens of a step) is {self.token_budget} and max_batch_size is {self.max_batch_size}; "
                "every running sequence must get its next token: raise the one or lower the other"
            )


@dataclass(frozen=True)
class Chunk:
    """One sequence's share of a step: tokens `start` up to `start + count`.

    `samples` says that this chunk reaches the sequence's last known token, so that its next token is drawn.  `pages` is
    a view of the sequence's page table, valid until the step is committed.
    """

    key: int
    start: int
    count: int
    samples: bool
    pages: Sequence[int]


@dataclass(frozen=True)
class StepPlan:
    """What one step computes; empty when there is nothing to do."""

    chunks: tuple[Chunk, ...]

    @property
    def token_count(self) -> int:
        return sum(chunk.count for chunk in self.chunks)


@dataclass
class _Sequence:
    """A request's counters; `table` is empty until it is admitted."""

    key: int
    worst_case: int
    known: int
    table: PageTable
    computed: int = 0

    @property
    def pending(self) -> int:
        return self.known - self.computed


class Scheduler:
    """Decides the steps.  Keys are the caller's, unique among live sequences."""

    def __init__(self, limits: SchedulerLimits, pool: PagePool) -> None:
        self.limits = limits
        self._pool = pool
        self._waiting: deque[_Sequence] = deque()
        self._running: dict[int, _Sequence] = {}
        self._in_flight: StepPlan | None = None
        self._cancelled: set[int] = set()

    @property
    def waiting_count(self) -> int:
        return len(self._waiting)

    @property
    def running_count(self) -> int:
        return len(self._running)

    @property
    def idle(self) -> bool:
        """Whether nothing waits and nothing runs."""
        return not self._waiting and not self._running

    @property
    def has_room(self) -> bool:
        """Whether `submit` would find room in the queue."""
        return len(self._waiting) < self.limits.max_waiting

    def submit(self, key: int, prompt_tokens: int, max_tokens: int) -> None:
        """Queue a sequence.

        Raises CapacityError, having changed nothing, when the queue is full or the sequence could never run: its worst
        case is larger than the whole pool.
        """
        self.check_fits(prompt_tokens, max_tokens)
        if not self.has_room:
            raise CapacityError(f"{len(self._waiting)} requests are waiting, which is the limit; try again later")
        worst_case = _worst_case(prompt_tokens, max_tokens)
        self._waiting.append(_Sequence(key, worst_case, prompt_tokens, PageTable(self._pool)))

    def check_fits(self, prompt_tokens: int, max_tokens: int) -> None:
        """Raise CapacityError when such a sequence needs more pages than the pool has.  Changes nothing."""
        needed = self._pool.pages_for(_worst_case(prompt_tokens, max_tokens))
        if needed > self._pool.page_count:
            raise CapacityError(
                f"{prompt_tokens} prompt tokens and up to {max_tokens} new ones need {needed} KV pages; the pool has "
                f"{self._pool.page_count}: shorten the prompt, lower max_tokens, or give the KV cache more memory"
            )

    def schedule(self) -> StepPlan:
        """Plan the next step, admitting what fits.

        Takes pages for admitted sequences; counters move only in `commit`.
        """
        if self._in_flight is not None:
            raise AssertionError("schedule() was called while a step is in flight; commit or abandon it first")
        budget = self.limits.token_budget
        ready = [sequence for sequence in self._running.values() if sequence.pending == 1]
        prompts = [sequence for sequence in self._running.values() if sequence.pending > 1]
        chunks = self._chunks([*ready, *prompts], budget)
        budget -= sum(chunk.count for chunk in chunks)
        while budget > 0 and self._can_admit():
            chunks += self._chunks([self._admit()], budget)
            budget -= chunks[-1].count
        self._in_flight = StepPlan(tuple(chunks))
        return self._in_flight

    def commit(self, finished: Collection[int] = ()) -> None:
        """Book the step in flight as computed: every sampling sequence has one more token.

        `finished` are the keys that end with this step; their pages, and those of sequences cancelled meanwhile, are
        released.
        """
        for chunk in self._take_step().chunks:
            sequence = self._running[chunk.key]
            sequence.computed += chunk.count
            sequence.known += chunk.samples
        self._release({*finished, *self._cancelled})

    def abandon(self, finished: Collection[int] = ()) -> None:
        """Forget the step in flight: nothing of it counts as computed.  `finished` as in `commit`."""
        self._take_step()
        self._release({*finished, *self._cancelled})

    def cancel(self, key: int) -> None:
        """End a sequence wherever it is; does nothing when it is not here.

        Its pages are released now, or with the step that is computing on them.
        """
        if key not in self._running:
            self._waiting = deque(sequence for sequence in self._waiting if sequence.key != key)
        elif self._in_flight is not None:
            self._cancelled.add(key)
        else:
            self._release({key})

    def check(self) -> None:
        """Recount the pool against all page tables; raises PageAccountingError.  Changes nothing."""
        self._pool.check(sequence.table for sequence in (*self._running.values(), *self._waiting))

    def _chunks(self, sequences: list[_Sequence], budget: int) -> list[Chunk]:
        chunks = []
        for sequence in sequences:
            pending = sequence.pending
            count = min(pending, budget)
            if count > 0:
                pages = sequence.table.pages
                chunks.append(Chunk(sequence.key, sequence.computed, count, count == pending, pages))
                budget -= count
        return chunks

    def _can_admit(self) -> bool:
        if not self._waiting or len(self._running) >= self.limits.max_batch_size:
            return False
        return self._pool.pages_for(self._waiting[0].worst_case) <= self._pool.free_count

    def _admit(self) -> _Sequence:
        sequence = self._waiting.popleft()
        sequence.table.grow(sequence.worst_case)
        self._running[sequence.key] = sequence
        return sequence

    def _take_step(self) -> StepPlan:
        if self._in_flight is None:
            raise AssertionError("there is no step in flight; call schedule() first")
        step, self._in_flight = self._in_flight, None
        return step

    def _release(self, keys: Collection[int]) -> None:
        for key in keys:
            self._running.pop(key).table.release()
        self._cancelled.clear()


def _worst_case(prompt_tokens: int, max_tokens: int) -> int:
    """Tokens that the pages must hold; the last generated token is never fed back."""
    return prompt_tokens + max_tokens - 1
