"""The compute stage against a scripted back end: batching changes no answer, and a fault stays where it belongs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from support.fake_backend import FakeBackend, Floats, Script, hashing_script, successor_script
from topg.backends.base import Step
from topg.kv.pages import PagePool
from topg.sampling_params import SamplingParams
from topg.scheduling import Scheduler, SchedulerLimits
from topg.stages.compute import Compute, StepOutput, Submission, TokenEvent
from topg.stages.queues import BoundedQueue
from topg.types import Request

VOCAB = 50
PAGES = 40


class Bench:
    """A compute stage with its queues, and the events by key."""

    def __init__(
        self, script: Script | None = None, *, batch: int = 4, budget: int = 16,
        on_run: Callable[[Step], None] | None = None,
    ) -> None:  # fmt: skip
        self.backend = FakeBackend(script or hashing_script(VOCAB), VOCAB, PAGES, on_run=on_run)
        self.pool = PagePool(PAGES, 4)
        self.inbox: BoundedQueue[Submission] = BoundedQueue("request", 100)
        self.outbox: BoundedQueue[StepOutput] = BoundedQueue("output", 2)
        self.compute = Compute(
            self.backend, Scheduler(SchedulerLimits(batch, budget), self.pool), self.inbox, self.outbox
        )
        self.events: dict[int, list[TokenEvent]] = {}

    def submit(self, key: int, request: Request) -> None:
        self.inbox.put(Submission(key, request))

    def step(self) -> None:
        self.compute.step()
        self.compute.scheduler.check()
        while (output := self.outbox.take()) is not None:
            for event in output.events:
                self.events.setdefault(event.key, []).append(event)

    def run(self) -> None:
        while not self.compute.idle:
            self.step()
        assert self.pool.used_count == 0

    def tokens(self, key: int) -> list[int]:
        return [event.sampled.token for event in self.events[key] if event.sampled is not None]

    def reason(self, key: int) -> str | None:
        assert all(event.finish_reason is None for event in self.events[key][:-1])
        return self.events[key][-1].finish_reason


def request(
    prompt: Sequence[int], max_tokens: int = 6, end: Sequence[int] = (), seed: int = 0, **params: Any
) -> Request:
    return Request(tuple(prompt), SamplingParams(**params), max_tokens, seed, frozenset(end))


def mixed_requests() -> list[Request]:
    rng = np.random.default_rng(4)
    settings: list[dict[str, Any]] = [
        {"temperature": 0}, {}, {"repetition_penalty": 2.0, "temperature": 0}, {"top_k": 3}, {"frequency_penalty": 1.0},
        {"logit_bias": {3: -100}}, {"logprobs": 2}, {"temperature": 100.0}, {"top_p": 0.5, "min_p": 0.1},
    ]  # fmt: skip
    return [
        request(rng.integers(0, VOCAB, 1 + 5 * i).tolist(), 3 + i, seed=i, **values)
        for i, values in enumerate(settings)
    ]


@pytest.mark.parametrize(("batch", "budget"), [(1, 1), (2, 3), (4, 16), (9, 500)])
def test_batch_and_chunks_change_no_answer(batch: int, budget: int) -> None:
    together = Bench(batch=batch, budget=budget)
    for key, wanted in enumerate(mixed_requests()):
        together.submit(key, wanted)
    together.run()
    for key, wanted in enumerate(mixed_requests()):
        alone = Bench()
        alone.submit(0, wanted)
        alone.run()
        assert [event.sampled for event in together.events[key]] == [event.sampled for event in alone.events[0]]


def test_late_arrivals_change_no_answer() -> None:
    bench = Bench()
    bench.submit(0, request([1, 2, 3], 12))
    for _ in range(4):
        bench.step()
    bench.submit(1, request([4] * 30, 5))
    bench.run()
    alone = Bench()
    alone.submit(0, request([1, 2, 3], 12))
    alone.run()
    assert bench.tokens(0) == alone.tokens(0)


def test_ends_at_max_tokens_and_at_end_tokens() -> None:
    bench = Bench(successor_script(VOCAB, lambda token: token + 1))
    bench.submit(0, request([0], 3, temperature=0))
    bench.submit(1, request([10], 30, end=[14], temperature=0))
    bench.submit(2, request([20], 4, end=[24], temperature=0))
    bench.run()
    assert bench.tokens(0) == [1, 2, 3] and bench.reason(0) == "length"
    assert bench.tokens(1) == [11, 12, 13, 14] and bench.reason(1) == "stop"
    assert bench.tokens(2) == [21, 22, 23, 24] and bench.reason(2) == "stop", "an end token on the last place counts"


def test_min_tokens_keeps_end_tokens_away() -> None:
    bench = Bench(successor_script(VOCAB, lambda token: 7))
    bench.submit(0, request([0], 10, end=[7], temperature=0, min_tokens=3))
    bench.run()
    assert len(bench.tokens(0)) == 4 and bench.tokens(0)[-1] == 7 and 7 not in bench.tokens(0)[:3]


def test_unusable_logits_end_their_request_only() -> None:
    def script(tokens: Sequence[int]) -> Floats:
        logits = hashing_script(VOCAB)(tokens)
        return np.full_like(logits, np.nan) if tokens[0] == 9 and len(tokens) == 5 else logits

    bench = Bench(script)
    bench.submit(0, request([1, 2], 8))
    bench.submit(1, request([9, 2, 3], 8))
    bench.run()
    assert bench.reason(0) == "length" and len(bench.tokens(0)) == 8
    assert bench.reason(1) == "error" and len(bench.tokens(1)) == 2
    assert "NaN" in str(bench.events[1][-1].error)


def test_a_failed_step_ends_its_requests_and_the_next_go_on() -> None:
    def fail(step: Step) -> None:
        if any(13 in part.tokens for part in step.slices):
            raise RuntimeError("kernel trouble")

    bench = Bench(on_run=fail, batch=2)
    for key, prompt in enumerate([[1, 2], [13], [3]]):
        bench.submit(key, request(prompt, 4, logit_bias={13: -100}))
    bench.run()
    assert [bench.reason(key) for key in range(3)] == ["error", "error", "length"]
    assert bench.events[0][-1].error == "the step failed: RuntimeError: kernel trouble"


def test_an_interrupt_leaves_everything_as_it_was() -> None:
    interrupts = [3]

    def interrupt(step: Step) -> None:
        interrupts[0] -= 1
        if interrupts[0] == 0:
            raise KeyboardInterrupt

    bench = Bench(on_run=interrupt)
    bench.submit(0, request([1, 2, 3]))
    with pytest.raises(KeyboardInterrupt):
        bench.run()
    bench.run()
    calm = Bench()
    calm.submit(0, request([1, 2, 3]))
    calm.run()
    assert bench.tokens(0) == calm.tokens(0)


def test_a_full_output_queue_holds_compute_up() -> None:
    bench = Bench()
    bench.submit(0, request([1], 10))
    for _ in range(5):
        bench.compute.step()
    assert len(bench.backend.steps) == bench.outbox.capacity
    bench.run()
    assert len(bench.tokens(0)) == 10


def test_cancel_in_every_place() -> None:
    bench = Bench(batch=1)
    for key in range(3):
        bench.submit(key, request([key], 10))
    bench.compute.cancel(2)
    bench.step()
    bench.compute.cancel(0)
    bench.compute.cancel(77)
    bench.run()
    assert len(bench.tokens(0)) == 1 and len(bench.tokens(1)) == 10 and 2 not in bench.events


def test_rows_that_do_not_fit_are_an_error_of_the_step() -> None:
    bench = Bench()
    bench.backend.run = lambda step: np.zeros((9, VOCAB), np.float32)  # type: ignore[method-assign]
    bench.submit(0, request([1]))
    bench.run()
    assert bench.reason(0) == "error"
