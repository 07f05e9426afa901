"""The engine: streams that interleave, threads that share steps, and pages that come back."""

from __future__ import annotations

import gc
import threading
from typing import Any

import pytest

from support.byte_tokenizer import byte_tokenizer
from support.fake_backend import FakeBackend, hashing_script
from topg.errors import CapacityError, RequestError
from topg.kv.pages import PagePool
from topg.sampling_params import SamplingParams
from topg.scheduling import SchedulerLimits
from topg.stages.engine import Engine
from topg.stages.output import result_of
from topg.types import GenerationResult, Request

VOCAB = 258
PAGES = 60


def engine(batch: int = 3, budget: int = 16, waiting: int = 4, **backend: Any) -> Engine:
    fake = FakeBackend(hashing_script(VOCAB), VOCAB, PAGES, **backend)
    return Engine(fake, byte_tokenizer(), PagePool(PAGES, 4), SchedulerLimits(batch, budget, waiting))


def request(seed: int, max_tokens: int = 10, **params: Any) -> Request:
    return Request((seed % VOCAB, 3, 5), SamplingParams(**params), max_tokens, seed, frozenset({0}))


def alone(wanted: Request) -> GenerationResult:
    return result_of(wanted, list(engine().start(wanted)))


def test_more_requests_than_the_queues_hold() -> None:
    shared = engine()
    requests = [request(seed, 4 + seed % 7) for seed in range(20)]
    streams = [shared.start(wanted) for wanted in requests]
    assert [result_of(wanted, list(stream)) for wanted, stream in zip(requests, streams, strict=True)] == [
        alone(wanted) for wanted in requests
    ]
    assert shared.status().pages_used == 0


def test_streams_interleave() -> None:
    shared = engine()
    wanted = [request(1), request(2)]
    streams = [shared.start(item) for item in wanted]
    seen: list[list[Any]] = [[], []]
    for _ in range(10):
        for index, stream in enumerate(streams):
            seen[index] += [delta for delta in [next(stream, None)] if delta is not None]
    assert [result_of(*pair) for pair in zip(wanted, seen, strict=True)] == [alone(item) for item in wanted]


def test_threads_share_the_engine() -> None:
    shared = engine()
    results: dict[int, GenerationResult] = {}

    def work(seed: int) -> None:
        wanted = request(seed, 12)
        results[seed] = result_of(wanted, list(shared.start(wanted)))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    assert results == {seed: alone(request(seed, 12)) for seed in range(12)}
    shared.check()
    assert shared.status().pages_used == 0


@pytest.mark.parametrize("read", [0, 1, 4])
def test_closing_a_stream_frees_its_pages_at_once(read: int) -> None:
    shared = engine()
    stream = shared.start(request(1, 50))
    other = shared.start(request(2))
    for _ in range(read):
        next(stream)
    stream.close()
    stream.close()
    assert list(stream) == []
    assert result_of(request(2), list(other)) == alone(request(2))
    assert shared.status().pages_used == 0
    shared.check()


def test_a_stream_that_is_let_go_frees_its_pages() -> None:
    shared = engine()
    next(shared.start(request(1, 50)))
    gc.collect()
    assert shared.status().pages_used == 0


def test_a_stop_string_frees_the_pages_with_the_step_that_found_it() -> None:
    shared = engine()
    text = alone(request(1, 30)).text
    with shared.start(request(1, 30, stop=text[3])) as stream:
        last = list(stream)[-1]
    assert last.finish_reason == "stop"
    assert (shared.status().running, shared.status().pages_used) == (0, 0)


def test_a_stop_string_ends_the_computing_even_when_nobody_reads() -> None:
    steps: list[int] = []
    shared = engine(on_run=lambda step: steps.append(len(step.slices)))
    unread = shared.start(request(1, 30, stop=alone(request(1, 30)).text[3]))
    list(shared.start(request(2, 12)))
    assert 2 in steps and steps[-1] == 1
    assert len(list(unread)) == 1


def test_a_close_during_a_step_is_carried_out_after_it() -> None:
    streams: list[Any] = []
    shared = engine(on_run=lambda step: streams[0].close() if len(step.slices) == 2 else None)
    streams.append(shared.start(request(1, 50)))
    wanted = request(2, 5)
    assert result_of(wanted, list(shared.start(wanted))) == alone(wanted)
    assert shared.status().pages_used == 0 and list(streams[0]) == []


def test_an_interrupted_reader_leaves_the_others_right() -> None:
    interrupts = [4]

    def interrupt(_: object) -> None:
        interrupts[0] -= 1
        if interrupts[0] == 0:
            raise KeyboardInterrupt

    shared = engine(on_run=interrupt)
    other = shared.start(request(2))
    with pytest.raises(KeyboardInterrupt), shared.start(request(1, 50)) as stream:
        list(stream)
    assert result_of(request(2), list(other)) == alone(request(2))
    assert shared.status().pages_used == 0


def test_polling_comes_back_after_every_step() -> None:
    steps: list[int] = []
    shared = engine(budget=4, on_run=lambda step: steps.append(step.token_count))
    long = Request(tuple(range(10, 40)), SamplingParams(), 5, 0, frozenset({0}))
    with shared.start(long) as stream:
        for done in range(1, 8):
            assert stream.poll() is None and len(steps) == done
        assert shared.status().running == 1
    assert len(steps) == 7 and stream.ended and stream.poll() is None
    assert shared.status().pages_used == 0


def test_polled_deltas_are_those_that_are_waited_for() -> None:
    seen = []
    with engine().start(request(1)) as stream:
        while not stream.ended:
            delta = stream.poll()
            seen += [delta] if delta is not None else []
    assert result_of(request(1), seen) == alone(request(1))


def test_what_can_never_run_is_refused() -> None:
    with pytest.raises(CapacityError, match="KV pages"):
        engine().start(request(1, PAGES * 4))


def test_a_closed_engine_refuses_everything() -> None:
    shared = engine()
    stream = shared.start(request(1))
    shared.close()
    with pytest.raises(RequestError, match="closed"):
        next(stream)
    with pytest.raises(RequestError, match="closed"):
        shared.start(request(2))
    stream.close()
