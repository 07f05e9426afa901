"""Stage 2: one step at a time through scheduler, back end and sampler."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from topg.backends.base import Backend, SequenceSlice, Step
from topg.errors import BackendError, ComputeError
from topg.sampling import Sampled, SamplerState
from topg.scheduling import Chunk, Scheduler, StepPlan
from topg.stages.queues import BoundedQueue
from topg.types import FinishReason, Request


@dataclass(frozen=True)
class Submission:
    """A request under the engine's own key for it."""

    key: int
    request: Request


class TokenEvent(NamedTuple):
    """One sequence's outcome of a step: a token, or the error that ended it; `finish_reason` on its last event."""

    key: int
    sampled: Sampled | None
    finish_reason: FinishReason | None = None
    error: str | None = None


@dataclass(frozen=True)
class StepOutput:
    """What a step gave."""

    events: tuple[TokenEvent, ...]


class _Sequence:
    """A request that is queued or running: all its tokens, and what the sampler remembers."""

    def __init__(self, request: Request, vocab: int) -> None:
        self.request = request
        self.tokens = list(request.prompt_tokens)
        self.sampler = SamplerState(request.params, request.seed, request.prompt_tokens, request.end_tokens, vocab)

    def accept(self, sampled: Sampled) -> FinishReason | None:
        """Append a token; the reason when it is the last one."""
        self.tokens.append(sampled.token)
        self.sampler.record(sampled.token)
        if sampled.token in self.request.end_tokens:
            return "stop"
        return "length" if self.sampler.generated == self.request.max_tokens else None


class Compute:
    """Takes submissions from `inbox` and puts what each step gave into `outbox`."""

    def __init__(
        self, backend: Backend, scheduler: Scheduler, inbox: BoundedQueue[Submission], outbox: BoundedQueue[StepOutput]
    ) -> None:
        self.scheduler = scheduler
        self._backend: Backend | None = backend
        self._vocab = backend.plan.vocab
        self._inbox = inbox
        self._outbox = outbox
        self._sequences: dict[int, _Sequence] = {}

    @property
    def idle(self) -> bool:
        """Whether nothing is queued or running."""
        return self.scheduler.idle and not self._inbox

    def step(self) -> None:
        """Run one step, if there is anything to do and room for what it gives.

        A failure ends the requests of the step, with the error in their events.  An interrupt from outside leaves
        everything as it was before the step.
        """
        self._accept_submissions()
        if self.scheduler.idle or self._outbox.full:
            return
        plan = self.scheduler.schedule()
        try:
            outcomes = self._compute(plan)
        except Exception as error:  # whatever a back end or a kernel raises must not take the other requests along
            self._end_step(plan, error)
        except BaseException:
            self.scheduler.abandon()
            raise
        else:
            self._commit(outcomes)

    def cancel(self, key: int) -> None:
        """Forget a sequence wherever it is and free its pages; does nothing when it has ended.  Not during a step."""
        if self._sequences.pop(key, None) is None:
            self._inbox.discard(lambda submission: submission.key == key)
        else:
            self.scheduler.cancel(key)

    def close(self) -> None:
        """Let go of the back end and its memory; what is still queued or running will not go on."""
        self._backend = None

    def _accept_submissions(self) -> None:
        while self.scheduler.has_room and (submission := self._inbox.take()) is not None:
            request = submission.request
            self.scheduler.submit(submission.key, len(request.prompt_tokens), request.max_tokens)
            self._sequences[submission.key] = _Sequence(request, self._vocab)

    def _compute(self, plan: StepPlan) -> dict[int, Sampled | ComputeError]:
        """Run the back end and draw; changes no sequence."""
        if self._backend is None:
            raise BackendError("the back end was closed")
        step = Step(tuple(self._slice(chunk) for chunk in plan.chunks))
        keys = [chunk.key for chunk in plan.chunks if chunk.samples]
        outcomes = self._backend.run_and_sample(step, [self._sequences[key].sampler for key in keys])
        return dict(zip(keys, outcomes, strict=True))

    def _slice(self, chunk: Chunk) -> SequenceSlice:
        tokens = self._sequences[chunk.key].tokens[chunk.start : chunk.start + chunk.count]
        return SequenceSlice(tokens, chunk.start, chunk.pages, "last" if chunk.samples else "none")

    def _commit(self, outcomes: dict[int, Sampled | ComputeError]) -> None:
        events = [self._event(key, outcome) for key, outcome in outcomes.items()]
        self.scheduler.commit(self._forget_finished(events))
        self._outbox.put(StepOutput(tuple(events)))

    def _event(self, key: int, outcome: Sampled | ComputeError) -> TokenEvent:
        if isinstance(outcome, ComputeError):
            return TokenEvent(key, None, "error", str(outcome))
        return TokenEvent(key, outcome, self._sequences[key].accept(outcome))

    def _end_step(self, plan: StepPlan, error: Exception) -> None:
        message = f"the step failed: {type(error).__name__}: {error}"
        events = [TokenEvent(chunk.key, None, "error", message) for chunk in plan.chunks]
        self.scheduler.abandon(self._forget_finished(events))
        self._outbox.put(StepOutput(tuple(events)))

    def _forget_finished(self, events: Sequence[TokenEvent]) -> list[int]:
        finished = [event.key for event in events if event.finish_reason is not None]
        for key in finished:
            del self._sequences[key]
        return finished
