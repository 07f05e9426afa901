"""Measuring a model through the stages that serve it: prompts and answers, step by step.

A case is a number of streams with prompts of one length.  All start together; once every prompt was read, decode steps
follow, in which each stream gets one token.  The back end is watched from outside: what a step takes in all, in the
back end, and in native code.  Speeds are compared with what the machine gave right before and after.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean, median, quantiles
from time import perf_counter

import numpy as np
import numpy.typing as npt

from topg.backends import Backend, backend_type, load_backend
from topg.backends.base import BackendType, SequenceSlice, Step
from topg.config import Config, Resolved
from topg.converter.format import ConvertedModel
from topg.errors import ComputeError, ConfigError
from topg.kv.pages import KVGeometry, PagePool
from topg.kv_budget import plan_kv
from topg.ops import Attention, Embed, Linear, Logits, Op, SelectRows, Workload
from topg.plan import Plan
from topg.sampling import Sampled, SamplerState
from topg.sampling_params import SamplingParams
from topg.scheduling import SchedulerLimits
from topg.stages.engine import AnswerStream, Engine
from topg.stages.intake import Intake, IntakeLimits
from topg.types import Request

MAX_CONTEXT, MAX_BATCH_SIZE = "execution.max_context", "execution.max_batch_size"
PROCESS_STATUS = Path("/proc/self/status")

Limits = Mapping[str, float]
MeasureLimits = Callable[[], Limits | None]


@dataclass(frozen=True)
class Case:
    """`batch` prompts of `prompt_tokens` tokens, then `decode_steps` steps of a token each.

    Early streams answer while later prompts are still read: with `overlap` tokens at most.
    """

    prompt_tokens: int
    batch: int
    decode_steps: int
    overlap: int

    @property
    def new_tokens(self) -> int:
        """Of a stream: its first, those of the overlap, and of one step more than is measured."""
        return 1 + self.overlap + self.decode_steps + 1

    @property
    def context(self) -> int:
        return self.prompt_tokens + self.new_tokens


@dataclass(frozen=True)
class Spread:
    """A median with the middle of what was measured: the tenth and the ninetieth part in a hundred."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        if len(values) == 1:
            return cls(values[0], values[0], values[0])
        tenths = quantiles(values, n=10, method="inclusive")
        return cls(median(values), tenths[0], tenths[-1])

    @property
    def relative(self) -> float:
        """Half of the range as a share of the median."""
        return (self.high - self.low) / 2 / self.median


@dataclass(frozen=True)
class CaseResult:
    """What a case gave; shares are of what the machine gave around it, None where that is not known.

    prefill_tokens_per_second  from the start until the last prompt was read; tokens that early streams got count
    first_token_seconds        from the start to a stream's first token
    step_seconds               from the start of a decode step to the start of the next
    outside_backend            share of a decode step's time outside the back end: scheduling, text, bookkeeping
    outside_native             share of it outside native code; None for a back end without
    """

    case: Case
    prefill_tokens_per_second: Spread
    first_token_seconds: Spread
    step_seconds: Spread
    decode_tokens_per_second: float
    outside_backend: float
    outside_native: float | None
    read_share: float | None
    peak_share: float | None
    limits: Limits | None


@dataclass(frozen=True)
class TimedStep:
    """A step as the back end saw it; times are those of `perf_counter`."""

    slices: tuple[tuple[int, int, bool], ...]  # start, tokens, whether a token is drawn
    begin: float
    end: float
    native_seconds: float | None

    def ends_prompt(self, length: int) -> int:
        """How many streams get their first token."""
        return sum(draws and start + tokens == length for start, tokens, draws in self.slices)

    def is_decode(self, case: Case) -> bool:
        """Whether it gives every stream one token, and does nothing else."""
        lone = all(tokens == 1 and start >= case.prompt_tokens for start, tokens, _ in self.slices)
        return lone and len(self.slices) == case.batch


class WatchedBackend:
    """A back end that keeps a record of its steps."""

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self.steps: list[TimedStep] = []

    @property
    def plan(self) -> Plan:
        return self.backend.plan

    @property
    def kv(self) -> KVGeometry:
        return self.backend.kv

    def run(self, step: Step) -> npt.NDArray[np.float32]:
        return self.backend.run(step)

    def run_and_sample(self, step: Step, states: Sequence[SamplerState]) -> list[Sampled | ComputeError]:
        """See Backend; with a line in the record."""
        native, begin = self._native_seconds(), perf_counter()
        outcomes = self.backend.run_and_sample(step, states)
        end, after = perf_counter(), self._native_seconds()
        spent = None if native is None or after is None else after - native
        self.steps.append(TimedStep(tuple(_shape(part) for part in step.slices), begin, end, spent))
        return outcomes

    def copy_page(self, source: int, target: int) -> None:
        self.backend.copy_page(source, target)

    def _native_seconds(self) -> float | None:
        return getattr(self.backend, "native_seconds", None)


@dataclass(frozen=True)
class Run:
    """The record of one run of a case: when it began, and its steps."""

    begin: float
    steps: tuple[TimedStep, ...]


class Benchmark:
    """A loaded model that cases are run on, through the same stages as `topg.LLM`."""

    def __init__(
        self, model: ConvertedModel, cases: Sequence[Case], resolved: Resolved, device: str, threads: int | None
    ) -> None:
        begin = perf_counter()
        settings = settings_for(cases, resolved, model.manifest.context)
        execution = settings.execution
        self.model = model
        self._type = backend_type(execution.backend, device, flash_attention=execution.enable_flash_attn)
        kv = plan_kv(model.manifest, settings, execution.max_context, device)
        self.kv, self._page_count = kv.geometry, kv.page_count
        self.backend = WatchedBackend(
            load_backend(
                model,
                execution.backend,
                page_count=kv.page_count,
                tokens_per_page=kv.geometry.tokens_per_page,
                kv_dtype=kv.geometry.dtype,
                device=device,
                threads=threads,
                flash_attention=execution.enable_flash_attn,
            )
        )
        tokenizer = model.load_tokenizer()
        limits = SchedulerLimits(execution.max_batch_size, execution.prefill_chunk)
        self._engine = Engine(self.backend, tokenizer, PagePool(kv.page_count, kv.geometry.tokens_per_page), limits)
        self._intake = Intake(tokenizer, (), IntakeLimits(execution.max_context, model.plan.vocab))
        self.load_seconds = perf_counter() - begin
        self.peak_bytes = resident_bytes("VmHWM")

    def fits(self, case: Case) -> bool:
        """Whether the pool has the pages for all streams of a case at once."""
        return case.batch * -(-case.context // self.kv.tokens_per_page) <= self._page_count

    def run(self, case: Case, repetitions: int, measure_limits: MeasureLimits) -> CaseResult:
        """Run a case a few times, between two looks at the machine."""
        before = measure_limits()
        runs = [self._run(case, seed) for seed in range(repetitions)]
        limits = _mean(before, measure_limits())
        return self._result(case, runs, limits)

    def warm_up(self) -> None:
        """A short run that nobody looks at."""
        self._run(Case(prompt_tokens=1, batch=1, decode_steps=2, overlap=1), seed=0)

    def close(self) -> None:
        """Let go of the model."""
        self._engine.close()

    def _run(self, case: Case, seed: int) -> Run:
        self.backend.steps.clear()
        requests = [self._request(case, seed * case.batch + stream) for stream in range(case.batch)]
        begin, streams = perf_counter(), list[AnswerStream]()
        try:
            streams += (self._engine.start(request) for request in requests)
            while not self._done(case) and not any(stream.ended for stream in streams):
                for stream in streams:
                    _poll(stream)
        finally:
            for stream in streams:
                stream.close()
        self.peak_bytes = max(self.peak_bytes, resident_bytes("VmRSS"))
        if not self._done(case):
            raise ComputeError(f"the {case.batch} streams ended before {case.decode_steps} steps of all of them ran")
        return Run(begin, tuple(self.backend.steps))

    def _done(self, case: Case) -> bool:
        """Whether enough decode steps ran; the last one only shows when the one before was over."""
        return sum(step.is_decode(case) for step in self.backend.steps) > case.decode_steps

    def _request(self, case: Case, seed: int) -> Request:
        """A prompt of random tokens, so that no two streams have anything in common."""
        draw = random.Random(seed)
        tokens = [draw.randrange(self.model.plan.vocab) for _ in range(case.prompt_tokens)]
        params = SamplingParams(temperature=0, max_tokens=case.new_tokens, ignore_eos=True)
        return self._intake.from_prompt(tokens, params)

    def _result(self, case: Case, runs: Sequence[Run], limits: Limits | None) -> CaseResult:
        pairs = [pair for run in runs for pair in _decode_steps(run, case)]
        steps = [step for step, _ in pairs]
        periods = [following.begin - step.begin for step, following in pairs]
        native = [step.native_seconds for step in steps if step.native_seconds is not None]
        step_seconds, rate = Spread.of(periods), Spread.of([_prefill_rate(run, case) for run in runs])
        costs = Costs(self.model, self._type, self.kv)
        context = mean(start + 1 for step in steps for start, _, _ in step.slices)
        return CaseResult(
            case=case,
            prefill_tokens_per_second=rate,
            first_token_seconds=Spread.of([seconds for run in runs for seconds in _first_tokens(run, case)]),
            step_seconds=step_seconds,
            decode_tokens_per_second=case.batch / step_seconds.median,
            outside_backend=1 - sum(step.end - step.begin for step in steps) / sum(periods),
            outside_native=1 - sum(native) / sum(periods) if native else None,
            read_share=None if limits is None else costs.read_share(case.batch, context, step_seconds.median, limits),
            peak_share=None if limits is None else costs.peak_share(case.prompt_tokens, rate.median, limits),
            limits=limits,
        )


@dataclass(frozen=True)
class Costs:
    """What a model's steps must read and compute at least."""

    model: ConvertedModel
    backend: BackendType
    kv: KVGeometry

    def read_share(self, rows: int, context: float, seconds: float, limits: Limits) -> float:
        """Share of a decode step's time that reading takes: weights, and keys and values of `context` tokens a row."""
        per_token = self.backend.page_bytes(self.kv) / self.kv.tokens_per_page / self.kv.layers
        attended = sum(min(context, op.window or context) for op in self.model.plan.attention)
        read = self._weight_bytes(rows) + rows * attended * per_token
        return read / limits["read_bytes_per_second"] / seconds

    def peak_share(self, tokens: int, tokens_per_second: float, limits: Limits) -> float:
        """Share of a prompt's time that it would take if every operation ran at the peak of its number type."""
        work = Workload(tokens=tokens, context=0, logits_rows=1)
        selected, seconds = False, 0.0
        for op in self.model.plan.ops:
            selected = selected or isinstance(op, SelectRows)
            rows = replace(work, tokens=work.logits_rows) if selected else work
            seconds += op.flops(rows) / limits[f"{self._arithmetic(op)}_ops_per_second"]
        return seconds * tokens_per_second / tokens

    def _arithmetic(self, op: Op) -> str:
        """Type of the numbers that an op multiplies."""
        if isinstance(op, Attention):
            return self.kv.dtype
        return self.model.precision(op.weight).activations if isinstance(op, (Linear, Logits)) else "float32"

    def _weight_bytes(self, rows: int) -> float:
        """An embedding is read row by row, everything else whole: a tied head, too."""
        total = 0.0
        for op in self.model.plan.ops:
            for name in op.tensors():
                record = self.model.manifest.tensors[name]
                size = self.backend.resident_bytes(record.precision, record.shape)
                total += size * min(rows, op.vocab) / op.vocab if isinstance(op, Embed) else size
        return total


def make_cases(lengths: Sequence[int], batches: Sequence[int], decode_steps: int, prefill_chunk: int) -> list[Case]:
    """Every length with every batch."""
    return [
        Case(length, batch, decode_steps, overlap=1 + -(-length * batch // max(1, prefill_chunk - batch + 1)))
        for length in lengths
        for batch in batches
    ]


def settings_for(cases: Sequence[Case], resolved: Resolved, limit: int) -> Config:
    """The configuration with room for the largest case; what the user set stays, and must suffice."""
    context, batch = max(case.context for case in cases), max(case.batch for case in cases)
    if context > limit:
        longest = max(cases, key=lambda case: case.context)
        raise ConfigError(
            f"a prompt of {longest.prompt_tokens} tokens and {longest.new_tokens} new ones, in a batch of "
            f"{longest.batch}, need a context of {longest.context}; the model's has {limit}: lower --prompt-lengths, "
            "--batch or --decode-steps"
        )
    for key, wanted in ((MAX_CONTEXT, context), (MAX_BATCH_SIZE, batch)):
        if not resolved.is_default(key) and resolved.value(key) < wanted:
            raise ConfigError(
                f"{key} is {resolved.value(key)} ({resolved.origins[key]}), and the cases need {wanted}: raise it, "
                "leave it out, or ask for smaller cases"
            )
    execution = replace(resolved.config.execution, max_context=context, max_batch_size=batch)
    return replace(resolved.config, execution=execution)


def resident_bytes(field: str) -> int:
    """This process's memory: VmRSS now, VmHWM at most so far; 0 where the system does not tell."""
    if not PROCESS_STATUS.is_file():
        return 0
    for line in PROCESS_STATUS.read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    return 0


def _shape(part: SequenceSlice) -> tuple[int, int, bool]:
    return part.start, len(part.tokens), part.logits != "none"


def _poll(stream: AnswerStream) -> None:
    delta = stream.poll()
    if delta is not None and delta.error is not None:
        raise ComputeError(delta.error)


def _prefill_rate(run: Run, case: Case) -> float:
    """Tokens per second until the last prompt was read."""
    last = max(index for index, step in enumerate(run.steps) if step.ends_prompt(case.prompt_tokens))
    tokens = sum(count for step in run.steps[: last + 1] for _, count, _ in step.slices)
    return tokens / (run.steps[last].end - run.begin)


def _first_tokens(run: Run, case: Case) -> Iterator[float]:
    for step in run.steps:
        for _ in range(step.ends_prompt(case.prompt_tokens)):
            yield step.end - run.begin


def _decode_steps(run: Run, case: Case) -> Iterator[tuple[TimedStep, TimedStep]]:
    """The decode steps, each with the one after it."""
    for step, following in zip(run.steps, run.steps[1:], strict=False):
        if step.is_decode(case) and following.is_decode(case):
            yield step, following


def _mean(before: Limits | None, after: Limits | None) -> Limits | None:
    if before is None or after is None:
        return None
    return {name: (before[name] + after[name]) / 2 for name in before}
