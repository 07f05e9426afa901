"""What `bench/peers.py` prints: medians of the rounds, and ratios."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from peer_runners.protocol import Job, Measured

LEAST_THROUGHPUT, MOST_MEMORY, MOST_FIRST_TOKEN = 2.3, 0.63, 0.42  # of the usual loop's


@dataclass(frozen=True)
class Workload:
    """What is measured: a prompt's computation when one token is asked for, decode otherwise."""

    name: str
    streams: int
    prompt_tokens: int
    new_tokens: int

    def job(self, seed: int) -> Job:
        return Job(self.streams, self.prompt_tokens, self.new_tokens, seed)

    def rate(self, measured: Measured) -> float | None:
        """Tokens per second."""
        if self.new_tokens == 1:
            return self.streams * self.prompt_tokens / measured.first_token_seconds
        return measured.decode_tokens_per_second


WORKLOADS: Mapping[str, Workload] = {
    workload.name: workload
    for workload in (
        Workload("prefill 512", 1, 512, 1),
        Workload("prefill 2048", 1, 2048, 1),
        Workload("decode 1", 1, 128, 65),
        Workload("decode 8", 8, 128, 65),
        Workload("decode 32", 32, 128, 65),
        Workload("decode 1 at 2000", 1, 2000, 65),
    )
}
FIRST_TOKEN = "prefill 512"
MEMORY = Workload("memory", 1, 512, 33)


@dataclass
class Record:
    """All that was measured of a contestant; `problems` are sentences about what was not."""

    version: str = ""
    load_seconds: float | None = None
    peak_bytes: int | None = None
    runs: dict[str, list[Measured]] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    def rate(self, workload: Workload) -> float | None:
        """Median of the rounds, tokens per second."""
        rates = [rate for run in self.runs.get(workload.name, ()) if (rate := workload.rate(run)) is not None]
        return median(rates) if rates else None

    def first_token_seconds(self) -> float | None:
        """Median of the rounds, for a prompt of 512 tokens."""
        return median(run.first_token_seconds for run in runs) if (runs := self.runs.get(FIRST_TOKEN)) else None


Records = Mapping[str, Record]


def comparison(records: Records, workloads: Sequence[Workload]) -> str:
    """Tokens per second of every contestant, and how many times as fast the first one is."""
    reference = next(iter(records.values()))
    header = ["", *(workload.name for workload in workloads), "first token, ms", "peak MB", "load, s"]
    rows = []
    for name, record in records.items():
        rates = [_cell(record.rate(item), reference.rate(item)) for item in workloads]
        first, peak = record.first_token_seconds(), record.peak_bytes
        seconds = (first and first * 1e3, peak and peak / 1e6, record.load_seconds)
        rows.append([name, *rates, *("-" if value is None else f"{value:,.1f}" for value in seconds)])
    return table(header, rows)


def _cell(value: float | None, reference: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if reference is None else f"{value:,.0f} ({reference / value:.2f}x)"


def floor(records: Records, workloads: Sequence[Workload], ours: Sequence[str], usual: Sequence[str]) -> str:
    """The promise against the usual loop, judged: throughput workload by workload, memory, first token."""
    rows = [
        [f"{our} against {loop}", *row]
        for our in ours
        for loop in usual
        for row in _floor_rows(records[our], records[loop], workloads)
    ]
    return table(["", "measure", "ours / usual", "promised", ""], rows)


def _floor_rows(our: Record, loop: Record, workloads: Sequence[Workload]) -> list[list[str]]:
    rates = [(item.name, our.rate(item), loop.rate(item)) for item in workloads]
    rows = [_judged(name, a, b, LEAST_THROUGHPUT, at_least=True) for name, a, b in rates]
    rows.append(_judged("peak memory", our.peak_bytes, loop.peak_bytes, MOST_MEMORY, at_least=False))
    first = our.first_token_seconds(), loop.first_token_seconds()
    return [*rows, _judged("first token", *first, MOST_FIRST_TOKEN, at_least=False)]


def _judged(name: str, ours: float | None, usual: float | None, bound: float, *, at_least: bool) -> list[str]:
    promised = f"{'>=' if at_least else '<='} {bound}"
    if ours is None or not usual:
        return [name, "-", promised, "not measured"]
    ratio = ours / usual
    kept = ratio >= bound if at_least else ratio <= bound
    return [name, f"{ratio:.2f}", promised, "kept" if kept else "MISSED"]


def notes(records: Records) -> list[str]:
    """Versions, and everything that is missing from the tables."""
    versions = [f"{name}: {record.version}" for name, record in records.items() if record.version]
    problems = [f"{name}: MISSING: {problem}" for name, record in records.items() for problem in record.problems]
    return versions + problems


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Markdown with aligned columns."""
    widths = [max(len(row[column]) for row in (header, *rows)) for column in range(len(header))]
    lines = [header, ["-" * width for width in widths], *rows]
    return "\n".join("| " + " | ".join(map(str.ljust, line, widths)) + " |" for line in lines)
