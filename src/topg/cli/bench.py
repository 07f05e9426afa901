"""`topg bench`: how fast a model runs here, and what share of the machine that is."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from topg.cli.messages import say
from topg.cli.options import config_from, filled_path, whole_number
from topg.cli.sampling_options import add_model_arguments
from topg.errors import CapacityError
from topg.plan_cost import human_bytes
from topg.wording import printable, shown

if TYPE_CHECKING:
    from topg.benchmark import Benchmark, CaseResult, Limits

MOST_ENTRIES = 64
LARGEST = 2**20
EXPLAINED = (
    "All streams of a line start together, with prompts of random tokens; greedy. prefill: tokens a second until the"
    " last prompt was read, and the share of the time that the machine would need at the peak of its multipliers."
    " first: time to a stream's first token. step: time of a decode step, and tok/s of all streams. +-: half the range"
    " of the middle four fifths. of read: the share of the machine's bandwidth that weights and cached keys and values"
    " need; more than 100% when caches hold a part. outside: the share of a decode step's time outside native code."
    " The last columns are the machine's own figures around the line: other programs lower them. Memory is read where"
    " /proc has it."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of the verb."""
    parser.epilog = EXPLAINED
    parser.add_argument("--prompt-lengths", type=_counts, default=[128, 512, 2048], metavar="N,N",
                        help="tokens of a prompt (default: 128,512,2048)")  # fmt: skip
    parser.add_argument("--batch", type=_counts, default=[1, 8, 32], metavar="N,N",
                        help="streams at a time (default: 1,8,32)")  # fmt: skip
    parser.add_argument("--decode-steps", type=_count, default=64, metavar="N",
                        help="decode steps of a run that are measured (default: 64)")  # fmt: skip
    parser.add_argument("--repetitions", type=_count, default=3, metavar="N",
                        help="runs of each line (default: 3)")  # fmt: skip
    parser.add_argument("--json", type=filled_path, metavar="FILE",
                        help="write the figures to FILE as JSON; - prints them instead of the table")  # fmt: skip
    add_model_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Load the model, run all cases, and show them."""
    from topg.benchmark import Benchmark, make_cases
    from topg.llm import check_threads
    from topg.loading import open_model
    from topg.paths import Home

    check_threads(args.threads)
    resolved = config_from(args)
    model = open_model(args.model, args.quant, Home.find(), lambda sentence: say(f"topg: {sentence}"))
    cases = make_cases(args.prompt_lengths, args.batch, args.decode_steps, resolved.config.execution.prefill_chunk)
    bench = Benchmark(model, cases, resolved, args.device, args.threads)
    try:
        machine = Machine(bench, args.device)
        table = None if args.json == Path("-") else Table(machine)
        results = []
        bench.warm_up()
        for case in cases:
            if not bench.fits(case):
                say(f"topg: {case.batch} streams of {case.context} tokens need more KV cache than fits; left out")
                continue
            results.append(bench.run(case, args.repetitions, machine.limits))
            if table is not None:
                table.add(results[-1])
        if not results:
            raise CapacityError("no case fits the KV cache: ask for smaller cases, or free some memory")
        if table is not None:
            print(f"peak memory {human_bytes(bench.peak_bytes)}, loaded in {bench.load_seconds:.1f} s")
        if args.json is not None:
            _write_json(args.json, _as_json(bench, machine, results))
    finally:
        bench.close()
    return 0


class Machine:
    """What computes, and how fast it could: `limits` measures that now, None on another device than the processor."""

    def __init__(self, bench: Benchmark, device: str) -> None:
        from topg.backends.native.machine import Machine as Processor

        backend = bench.backend.backend
        self.name = printable(bench.model.manifest.name)
        self.recipe = bench.model.manifest.recipe
        self.kv_dtype = bench.kv.dtype
        self.device = device
        self.isa: str | None = getattr(backend, "isa", None)
        self.threads: int | None = getattr(backend, "threads", None)
        self.processor = Processor.detect().model

    def limits(self) -> Limits | None:
        """Bandwidth, peaks and barrier time of the native back end's instruction set and threads."""
        if self.isa is None or self.threads is None:
            return None
        from topg import _native

        return _native.measure_limits(self.isa, self.threads)

    def __str__(self) -> str:
        computes = f"{self.isa}, {self.threads} threads" if self.isa else f"torch, {self.device}"
        return f"{self.name} ({self.recipe}, KV cache {self.kv_dtype}) on {self.processor} ({computes})"


class Table:
    """Prints a line as soon as it is known."""

    COLUMNS = (
        ("prompt", 6), ("batch", 5),
        ("prefill tok/s", 13), ("+-", 4), ("of peak", 7), ("first", 9),
        ("step", 9), ("+-", 4), ("tok/s", 8), ("of read", 7), ("outside", 7),
        ("read GB/s", 9), ("barrier", 7),
    )  # fmt: skip

    def __init__(self, machine: Machine) -> None:
        print(machine)
        self._print([name for name, _ in self.COLUMNS])

    def add(self, result: CaseResult) -> None:
        """The line of a case."""
        limits, rate = result.limits, result.prefill_tokens_per_second
        outside = result.outside_backend if result.outside_native is None else result.outside_native
        self._print(
            [
                str(result.case.prompt_tokens),
                str(result.case.batch),
                f"{rate.median:,.0f}",
                _share(rate.relative),
                _share(result.peak_share),
                _time(result.first_token_seconds.median),
                _time(result.step_seconds.median),
                _share(result.step_seconds.relative),
                f"{result.decode_tokens_per_second:,.1f}",
                _share(result.read_share),
                _share(outside),
                f"{limits['read_bytes_per_second'] / 1e9:.1f}" if limits else "",
                f"{limits['barrier_seconds'] * 1e6:.1f} us" if limits else "",
            ]
        )

    def _print(self, cells: Sequence[str]) -> None:
        widths = (width for _, width in self.COLUMNS)
        print("  ".join(cell.rjust(width) for cell, width in zip(cells, widths, strict=True)).rstrip(), flush=True)


def _share(value: float | None) -> str:
    return "" if value is None else f"{value:.0%}"


def _time(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.2f} ms"


def _as_json(bench: Benchmark, machine: Machine, results: Sequence[CaseResult]) -> dict[str, Any]:
    return vars(machine) | {
        "load_seconds": bench.load_seconds,
        "peak_bytes": bench.peak_bytes,
        "cases": [asdict(result) for result in results],
    }


def _write_json(target: Path, data: dict[str, Any]) -> None:
    text = json.dumps(data, indent=1, allow_nan=False)
    if target == Path("-"):
        sys.stdout.write(text + "\n")
    else:
        target.write_text(text + "\n", encoding="utf-8")


def _count(text: str) -> int:
    value = whole_number(text)
    if not 1 <= value <= LARGEST:
        raise argparse.ArgumentTypeError(f"{shown(value)} is out of range; allowed: 1 to {LARGEST:,}")
    return value


def _counts(text: str) -> list[int]:
    values = [_count(item) for item in text.split(",")]
    if len(values) > MOST_ENTRIES:
        raise argparse.ArgumentTypeError(f"{len(values)} numbers are too many; allowed: at most {MOST_ENTRIES}")
    return values
