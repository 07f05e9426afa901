"""The scheduler's promises, on hundreds of random traces by seed and on a few drawn by hand."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from topg.errors import CapacityError, ConfigError
from topg.kv.pages import PagePool
from topg.scheduling import Scheduler, SchedulerLimits, StepPlan

PAGE = 4


def scheduler(pages: int = 16, batch: int = 4, budget: int = 8, waiting: int = 100) -> tuple[Scheduler, PagePool]:
    pool = PagePool(pages, PAGE)
    return Scheduler(SchedulerLimits(batch, budget, waiting), pool), pool


def counts(step: StepPlan) -> list[tuple[int, int, int, bool]]:
    return [(chunk.key, chunk.start, chunk.count, chunk.samples) for chunk in step.chunks]


# ---- random traces


@dataclass
class Trace:
    """Random arrivals, cancels, failed steps and early ends; checks every promise after every step."""

    seed: int
    arrived: dict[int, tuple[int, int]] = field(default_factory=dict)
    generated: dict[int, int] = field(default_factory=dict)
    computed: dict[int, int] = field(default_factory=dict)
    admitted: list[int] = field(default_factory=list)
    ended: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        batch = self.random.randint(1, 6)
        self.budget = self.random.randint(batch, 40)
        self.pool = PagePool(self.random.randint(4, 40), PAGE)
        self.scheduler = Scheduler(SchedulerLimits(batch, self.budget, 30), self.pool)

    def run(self, requests: int = 25) -> None:
        steps = 0
        while len(self.arrived) < requests or not self.scheduler.idle:
            if len(self.arrived) < requests and self.random.random() < 0.6:
                self.arrive()
            if self.random.random() < 0.03:
                self.cancel()
            self.step()
            steps += 1
            assert steps < 20_000, "somebody does not finish"
        assert self.pool.used_count == 0
        assert self.ended == set(self.arrived), "everybody ends"
        assert self.admitted == sorted(self.admitted), "first come, first served"

    def arrive(self) -> None:
        key = len(self.arrived)
        room = self.pool.page_count * PAGE
        prompt = self.random.randint(1, min(room, 60))
        new = self.random.randint(1, max(1, min(room - prompt + 1, 20)))
        self.scheduler.submit(key, prompt, new)
        self.arrived[key] = (prompt, new)
        self.generated[key] = self.computed[key] = 0

    def cancel(self) -> None:
        live = [key for key in self.arrived if key not in self.ended]
        if live:
            self.end(self.random.choice(live))

    def end(self, key: int) -> None:
        self.scheduler.cancel(key)
        self.ended.add(key)

    def step(self) -> None:
        step = self.scheduler.schedule()
        assert step.token_count <= self.budget
        for chunk in step.chunks:
            self.check_chunk(chunk.key, chunk.start, chunk.count, chunk.samples, len(chunk.pages))
        if self.random.random() < 0.05:
            self.scheduler.abandon()
        else:
            self.commit(step)
        self.scheduler.check()

    def check_chunk(self, key: int, start: int, count: int, samples: bool, pages: int) -> None:
        if key not in self.admitted:
            self.admitted.append(key)
        assert key not in self.ended, "nothing is computed for who has ended"
        assert start == self.computed[key] and count >= 1
        known = self.arrived[key][0] + self.generated[key]
        assert start + count <= known and samples == (start + count == known)
        assert pages * PAGE >= start + count

    def commit(self, step: StepPlan) -> None:
        if self.random.random() < 0.05:
            self.cancel()
        finished = []
        for chunk in step.chunks:
            self.computed[chunk.key] += chunk.count
            self.generated[chunk.key] += chunk.samples
            full = self.generated[chunk.key] == self.arrived[chunk.key][1]
            if chunk.key not in self.ended and (full or (chunk.samples and self.random.random() < 0.1)):
                finished.append(chunk.key)
        self.scheduler.commit(finished)
        self.ended.update(finished)


@pytest.mark.parametrize("first", range(0, 400, 50))
def test_random_traces_keep_every_promise(first: int) -> None:
    for seed in range(first, first + 50):
        Trace(seed).run()


def test_a_trace_repeats() -> None:
    def steps(seed: int) -> list[int]:
        trace = Trace(seed)
        trace.run()
        return [*trace.admitted, *trace.computed.values()]

    assert steps(7) == steps(7)


# ---- by hand


def test_running_sequences_get_their_token_before_prompts() -> None:
    queue, _ = scheduler(budget=8)
    queue.submit(0, 3, 5)
    assert counts(queue.schedule()) == [(0, 0, 3, True)]
    queue.commit()
    queue.submit(1, 20, 5)
    assert counts(queue.schedule()) == [(0, 3, 1, True), (1, 0, 7, False)]
    queue.commit()
    assert counts(queue.schedule()) == [(0, 4, 1, True), (1, 7, 7, False)]
    queue.commit()
    assert counts(queue.schedule()) == [(0, 5, 1, True), (1, 14, 6, True)]


def test_the_rest_of_the_budget_goes_to_the_next_in_the_queue() -> None:
    queue, _ = scheduler(budget=8)
    for key in range(3):
        queue.submit(key, 3, 2)
    assert counts(queue.schedule()) == [(0, 0, 3, True), (1, 0, 3, True), (2, 0, 2, False)]


def test_a_free_place_is_taken_at_once() -> None:
    queue, _ = scheduler(batch=1)
    queue.submit(0, 2, 2)
    queue.submit(1, 2, 2)
    queue.schedule()
    queue.commit(finished=[0])
    assert counts(queue.schedule()) == [(1, 0, 2, True)]


def test_admission_reserves_the_worst_case_and_the_head_is_not_overtaken() -> None:
    queue, pool = scheduler(pages=4)
    queue.submit(0, 5, 4)
    queue.submit(1, 5, 5)
    queue.submit(2, 1, 1)
    assert [chunk.key for chunk in queue.schedule().chunks] == [0]
    assert pool.used_count == 2, "5 + 4 - 1 tokens: the last one is never fed back"
    queue.commit(finished=[0])
    assert [chunk.key for chunk in queue.schedule().chunks] == [1, 2]


def test_what_can_never_run_is_refused_at_once() -> None:
    queue, _ = scheduler(pages=2)
    queue.submit(0, 5, 4)
    with pytest.raises(CapacityError, match="need 3 KV pages; the pool has 2"):
        queue.submit(1, 5, 5)
    assert queue.waiting_count == 1


def test_the_queue_is_bounded() -> None:
    queue, _ = scheduler(waiting=2)
    queue.submit(0, 1, 1)
    queue.submit(1, 1, 1)
    assert not queue.has_room
    with pytest.raises(CapacityError, match="2 requests are waiting"):
        queue.submit(2, 1, 1)


def test_cancel_while_waiting_running_and_in_flight() -> None:
    queue, pool = scheduler(batch=2)
    for key in range(4):
        queue.submit(key, 2, 4)
    queue.schedule()
    queue.cancel(0)
    assert pool.used_count == 4, "the step in flight still writes these pages"
    queue.commit()
    assert pool.used_count == 2
    queue.cancel(1)
    queue.cancel(2)
    queue.cancel(99)
    assert pool.used_count == 0
    assert [chunk.key for chunk in queue.schedule().chunks] == [3]


def test_an_abandoned_step_is_planned_again() -> None:
    queue, _ = scheduler()
    queue.submit(0, 3, 2)
    first = counts(queue.schedule())
    queue.abandon()
    assert counts(queue.schedule()) == first


def test_steps_do_not_overlap() -> None:
    queue, _ = scheduler()
    with pytest.raises(AssertionError):
        queue.commit()
    queue.schedule()
    with pytest.raises(AssertionError):
        queue.schedule()


@pytest.mark.parametrize("limits", [(0, 8, 1), (1, 8, 0), (9, 8, 1)])
def test_limits_that_cannot_work_are_refused(limits: tuple[int, int, int]) -> None:
    with pytest.raises(ConfigError):
        SchedulerLimits(*limits)
