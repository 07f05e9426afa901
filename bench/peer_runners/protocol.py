"""What a peer's runner and `bench/peers.py` say to each other: one JSON object a line, on stdin and stdout.

    driver   {"model": ..., "variant": ..., "threads": 2, "max_context": 2200, "max_streams": 32, "launcher": ...}
    runner   {"version": "4.8.5", "load_seconds": 1.2}
    driver   {"streams": 8, "prompt_tokens": 128, "new_tokens": 64, "seed": 3}      as often as it likes
    runner   the fields of `Measured`, and "peak_bytes"; or {"error": "..."}

A runner is executed with its engine's own Python, so this file needs nothing but the standard library.
"""

from __future__ import annotations

import json
import os
import random
import resource
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Protocol, TextIO

PROMPT_TOKENS_FROM, PROMPT_TOKENS_TO = 1000, 30_000  # ids that every vocabulary has, beyond special tokens and bytes


@dataclass(frozen=True)
class Setup:
    """What is loaded, and for how much work; `launcher` is the folder or Python the user named for this peer."""

    model: str
    variant: str
    threads: int
    max_context: int
    max_streams: int
    launcher: str


@dataclass(frozen=True)
class Job:
    """Prompts of random tokens, computed and continued greedily together; an end token does not end them."""

    streams: int
    prompt_tokens: int
    new_tokens: int
    seed: int

    def prompts(self) -> list[list[int]]:
        """Different in every job, so that no engine finds a prefix it has kept."""
        source = random.Random(self.seed)
        ids = range(PROMPT_TOKENS_FROM, PROMPT_TOKENS_TO)
        return [source.choices(ids, k=self.prompt_tokens) for _ in range(self.streams)]


@dataclass(frozen=True)
class Measured:
    """One job's figures.

    first_token_seconds       from handing over the prompts until each has its first new token
    decode_tokens_per_second  mean of all streams together from then on; None without a second token
    median_step_seconds       median time of a decode step; None where an engine tells means only
    """

    first_token_seconds: float
    decode_tokens_per_second: float | None = None
    median_step_seconds: float | None = None


class Engine(Protocol):
    """An engine with a loaded model."""

    version: str

    def measure(self, job: Job) -> Measured: ...

    def peak_bytes(self) -> int: ...


class SteppingEngine(Protocol):
    """An engine that shows when each step ends."""

    version: str

    def generate(self, prompts: list[list[int]], new_tokens: int) -> Iterator[Sequence[int]]:
        """Once a step, how many tokens each stream has got in it, until all streams have `new_tokens`."""


class Stepped:
    """Measures an engine by the clock between its steps."""

    def __init__(self, engine: SteppingEngine) -> None:
        self._engine = engine
        self.version = engine.version

    def measure(self, job: Job) -> Measured:
        prompts = job.prompts()
        counts, times = [[0] * job.streams], [time.perf_counter()]
        for step in self._engine.generate(prompts, job.new_tokens):
            counts.append([before + new for before, new in zip(counts[-1], step, strict=True)])
            times.append(time.perf_counter())
        return figures(counts, times, job.new_tokens)

    def peak_bytes(self) -> int:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def figures(counts: Sequence[Sequence[int]], times: Sequence[float], new_tokens: int) -> Measured:
    """From the tokens each stream had after each step, and when; the first entry is the start.

    Decode is timed while every stream takes part: from the last one's first token to the first one's last.
    """
    if not counts or min(counts[-1]) < 1:
        raise RuntimeError("a stream ended without a token")
    begin = next(index for index, count in enumerate(counts) if min(count) >= 1)
    end = next((index for index, count in enumerate(counts) if max(count) >= new_tokens), len(counts) - 1)
    first_token_seconds = times[begin] - times[0]
    if end <= begin:
        return Measured(first_token_seconds)
    tokens = sum(counts[end]) - sum(counts[begin])
    steps = [after - before for before, after in pairwise(times[begin : end + 1])]
    return Measured(first_token_seconds, tokens / (times[end] - times[begin]), statistics.median(steps))


def serve(load: Callable[[Setup], Engine]) -> None:
    """Answer the driver until it closes our input.  What the engine prints goes to stderr."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    setup = Setup(**json.loads(sys.stdin.readline()))
    begin = time.perf_counter()
    engine = load(setup)
    _say(answers, {"version": engine.version, "load_seconds": time.perf_counter() - begin})
    for line in sys.stdin:
        _say(answers, _answer(engine, Job(**json.loads(line))))


def _answer(engine: Engine, job: Job) -> dict[str, object]:
    try:
        measured = engine.measure(job)
    except Exception as error:  # whatever a peer raises is its result
        return {"error": f"{type(error).__name__}: {error}"}
    return asdict(measured) | {"peak_bytes": engine.peak_bytes()}


def _say(answers: TextIO, value: dict[str, object]) -> None:
    print(json.dumps(value), file=answers, flush=True)
