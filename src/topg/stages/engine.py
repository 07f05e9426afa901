"""The three stages in one process, driven by whoever waits for an answer.

There is no background thread: a caller without news pumps, which moves every request on by one step, under a lock.
Several threads, and several streams within one thread, share the engine this way; each step serves them all.
"""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass
from itertools import count

from topg.backends.base import Backend
from topg.errors import RequestError
from topg.kv.pages import PagePool
from topg.scheduling import Scheduler, SchedulerLimits
from topg.stages.compute import Compute, StepOutput, Submission
from topg.stages.output import Output
from topg.stages.queues import BoundedQueue
from topg.tokenizer.tokenizer import Tokenizer
from topg.types import Delta, Request

OUTPUT_QUEUE_STEPS = 8


@dataclass(frozen=True)
class EngineStatus:
    """Requests and pages now."""

    waiting: int
    running: int
    pages_used: int
    pages_free: int


class Engine:
    """Connects compute and output; requests come from an `Intake`."""

    def __init__(self, backend: Backend, tokenizer: Tokenizer, pool: PagePool, limits: SchedulerLimits) -> None:
        self._inbox: BoundedQueue[Submission] = BoundedQueue("request", limits.max_waiting)
        outputs: BoundedQueue[StepOutput] = BoundedQueue("output", OUTPUT_QUEUE_STEPS)
        self._pool = pool
        self._compute = Compute(backend, Scheduler(limits, pool), self._inbox, outputs)
        self._output = Output(tokenizer, outputs)
        self._keys = count()
        self._lock = threading.Lock()
        self._to_cancel: deque[int] = deque()
        self._closed = False

    def start(self, request: Request) -> AnswerStream:
        """Queue a request; pumps while the queue is full.  Raises CapacityError when the request could never run."""
        self._compute.scheduler.check_fits(len(request.prompt_tokens), request.max_tokens)
        while True:
            with self._lock:
                self._check_open()
                if not self._inbox.full:
                    return AnswerStream(self, request, self._accept(request))
                self._pump()

    def next_delta(self, key: int) -> Delta:
        """What is new of an answer since the last call; pumps until there is something."""
        while (delta := self.poll(key)) is None:
            pass
        return delta

    def poll(self, key: int) -> Delta | None:
        """What is new of an answer since the last call, if need be after one step; None when that gave it nothing."""
        with self._lock:
            self._check_open()
            delta = self._output.take(key)
            if delta is None:
                self._pump()
                delta = self._output.take(key)
            return delta

    def cancel(self, key: int) -> None:
        """End a request and free its pages; does nothing when it has ended.

        Never waits: it may be called from anywhere, also by the garbage collector in the middle of a step.  Then the
        running step, or at the latest the next one, carries it out.
        """
        self._to_cancel.append(key)
        if self._lock.acquire(blocking=False):
            try:
                self._carry_out_cancels()
            finally:
                self._lock.release()

    def status(self) -> EngineStatus:
        """Counts of requests and pages."""
        with self._lock:
            self._check_open()
            self._carry_out_cancels()
            scheduler = self._compute.scheduler
            return EngineStatus(
                waiting=len(self._inbox) + scheduler.waiting_count,
                running=scheduler.running_count,
                pages_used=self._pool.used_count,
                pages_free=self._pool.free_count,
            )

    def require_open(self) -> None:
        """Raise RequestError once the engine was closed."""
        with self._lock:
            self._check_open()

    def check(self) -> None:
        """Recount the pages; raises PageAccountingError when one leaked."""
        with self._lock:
            self._compute.scheduler.check()

    def close(self) -> None:
        """Let go of the back end once the step that runs now is done; every later call is refused."""
        with self._lock:
            self._closed = True
            self._compute.close()

    def _accept(self, request: Request) -> int:
        key = next(self._keys)
        self._output.open(key, request)
        self._inbox.put(Submission(key, request))
        return key

    def _pump(self) -> None:
        """One step for everybody."""
        self._carry_out_cancels()
        self._compute.step()
        for key in self._output.process():
            self._compute.cancel(key)
        self._carry_out_cancels()

    def _carry_out_cancels(self) -> None:
        while self._to_cancel:
            key = self._to_cancel.popleft()
            self._compute.cancel(key)
            self._output.close(key)

    def _check_open(self) -> None:
        if self._closed:
            raise RequestError("this model was closed; load it again to use it")


class AnswerStream:
    """One answer as an iterator of deltas, the last of which has a finish_reason.

    Closing it early ends the request and frees its pages; so does leaving its `with` block, or letting go of it.  One
    thread at a time may read it.
    """

    def __init__(self, engine: Engine, request: Request, key: int) -> None:
        self.request = request
        self._engine = engine
        self._key = key
        self._ended = False

    def __iter__(self) -> AnswerStream:
        return self

    def __next__(self) -> Delta:
        if self._ended:
            raise StopIteration
        return self._seen(self._engine.next_delta(self._key))

    def poll(self) -> Delta | None:
        """The next delta, or None when it takes more than one step, as in a long prompt, or the answer has ended."""
        delta = None if self._ended else self._engine.poll(self._key)
        return None if delta is None else self._seen(delta)

    @property
    def ended(self) -> bool:
        """Whether nothing more will come."""
        return self._ended

    def close(self) -> None:
        """End the request, unless it has ended.  Later reads give nothing more."""
        if not self._ended:
            self._ended = True
            self._engine.cancel(self._key)

    def _seen(self, delta: Delta) -> Delta:
        if delta.finish_reason is not None:
            self.close()
        return delta

    def __enter__(self) -> AnswerStream:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()
