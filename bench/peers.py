"""ToPG beside other engines: the same model, prompts and threads, in turns, on this machine.

    python bench/make_peer_models.py SOURCE.gguf MODELS
    python bench/peers.py MODELS --peer llama.cpp=FOLDER_OF_TOOLS --peer transformers=VENV --peer openvino=VENV ...

Each contestant is loaded once in a process of its own, of its own Python (bench/peer_runners/), and all stay loaded;
each workload goes to all of them in turn, round after round, in reverse order every second round, so that a busy
minute of the machine hits everybody.  A contestant that is not installed or fails is listed as missing.

A figure is the median over rounds of a run's mean: tokens per second of a fresh prompt, or of decode from the last
stream's first token to the first stream's last.  ToPG is timed with scheduling, sampling and text; llama.cpp's tools
time forward passes alone; the others sample greedily.  The prefill figures' reciprocal is the time to first token.
Memory is the peak of a second, fresh process, set up for one stream, after a prompt of 512 tokens and 32 steps; pages
of a mapped model file count.
"""

from __future__ import annotations

import argparse
import json
import platform
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path

from peer_process import CONTESTANTS, TOPG, Load, PeerError, PeerProcess
from peer_report import MEMORY, WORKLOADS, Record, Workload, comparison, floor, notes

Limits = Mapping[str, float]


class Race:
    """Contestants that take turns; what they cannot do is kept as a problem of their record."""

    def __init__(self, names: Sequence[str], models: Path, load: Load, peers: Mapping[str, str]) -> None:
        self.records = {name: Record() for name in names}
        self._models, self._load, self._peers = models, load, peers
        self._loaded: dict[str, PeerProcess] = {}

    def start(self, stack: ExitStack) -> None:
        """Load everybody, for as long as `stack` lives."""
        for name, record in self.records.items():
            try:
                self._loaded[name] = stack.enter_context(self._process(name, self._load))
                record.version = self._loaded[name].version
            except PeerError as error:
                record.problems.append(str(error))

    def measure_memory(self, threads: int, spin_count: int | None) -> None:
        """Peak memory and load time in fresh processes; what is converted or compiled once is there by now."""
        load = Load(threads, MEMORY.prompt_tokens + MEMORY.new_tokens, MEMORY.streams, spin_count)
        for name in self._loaded:
            record = self.records[name]
            try:
                with self._process(name, load) as process:
                    process.measure(MEMORY.job(seed=0))
                    record.load_seconds, record.peak_bytes = process.load_seconds, process.peak_bytes
            except PeerError as error:
                record.problems.append(f"memory: {error}")

    def run_round(self, workloads: Sequence[Workload], index: int) -> None:
        """Every workload once by everybody."""
        turns = list(self._loaded)[:: -1 if index % 2 else 1]
        for place, workload in enumerate(workloads):
            for name in turns:
                self._run(name, workload, seed=index * len(workloads) + place)

    def _run(self, name: str, workload: Workload, seed: int) -> None:
        record = self.records[name]
        try:
            measured = self._loaded[name].measure(workload.job(seed))
            record.runs.setdefault(workload.name, []).append(measured)
        except PeerError as error:
            record.problems.append(f"{workload.name}: {error}")

    def _process(self, name: str, load: Load) -> PeerProcess:
        return PeerProcess(CONTESTANTS[name], self._models, load, self._peers)


def machine_limits(threads: int) -> Limits:
    """What the machine gives at this moment; empty without the native module."""
    try:
        from topg import _native
    except ImportError:
        return {}
    return _native.measure_limits(_native.usable_isas()[-1], threads)


def limits_line(measured: Sequence[Limits]) -> str:
    """Ranges over the rounds."""
    if not any(measured):
        return "machine: not measured, topg._native is not built"
    reads = [limits["read_bytes_per_second"] / 1e9 for limits in measured]
    barriers = [limits["barrier_seconds"] * 1e9 for limits in measured]
    return (
        f"machine: {min(reads):.1f}-{max(reads):.1f} GB/s read by all threads, "
        f"{min(barriers):.0f}-{max(barriers):.0f} ns a barrier, before each round"
    )


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", type=Path, help="folder that make_peer_models.py has filled")
    parser.add_argument("--peer", type=_place, action="append", default=[], metavar="NAME=PATH",
                        help="a virtual environment, a Python, or for llama.cpp the folder of its tools; "
                        "else TOPG_PEER_NAME")  # fmt: skip
    parser.add_argument("--contestants", nargs="+", choices=CONTESTANTS, default=list(CONTESTANTS),
                        metavar="PEER:VARIANT",
                        help=f"the first is the reference; of {', '.join(CONTESTANTS)}")  # fmt: skip
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=list(WORKLOADS), metavar="NAME",
                        help=f"of {', '.join(WORKLOADS)}")  # fmt: skip
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--spin-count", type=int, metavar="N",
                        help="GOMP_SPINCOUNT for every peer: how long an OpenMP thread spins before it sleeps; "
                        "1000 on a machine that is shared (default: OpenMP's own)")  # fmt: skip
    parser.add_argument("--no-memory", action="store_true", help="leave the second load of each peer out")
    parser.add_argument("--floor", action="store_true", help="judge ToPG's promise against transformers")
    parser.add_argument("--json", type=Path, metavar="FILE", help="every run's figures")
    return parser.parse_args()


def _place(text: str) -> tuple[str, str]:
    name, equals, path = text.partition("=")
    known = sorted({contestant.peer for contestant in CONTESTANTS.values()})
    if not equals or name not in known:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=PATH; names: {', '.join(known)}")
    return name, path


def race(arguments: argparse.Namespace, workloads: Sequence[Workload]) -> tuple[dict[str, Record], list[Limits]]:
    """Everything measured, and the machine's limits before each round."""
    context = max(item.prompt_tokens + item.new_tokens for item in workloads)
    load = Load(arguments.threads, context, max(item.streams for item in workloads), arguments.spin_count)
    runners = Race(arguments.contestants, arguments.models, load, dict(arguments.peer))
    limits = []
    with ExitStack() as stack:
        runners.start(stack)
        if not arguments.no_memory:
            runners.measure_memory(arguments.threads, arguments.spin_count)
        for index in range(arguments.rounds):
            limits.append(machine_limits(arguments.threads))
            runners.run_round(workloads, index)
    return runners.records, limits


def write_json(path: Path, records: Mapping[str, Record], limits: Sequence[Limits]) -> None:
    values = {"limits": list(limits), "contestants": {name: asdict(record) for name, record in records.items()}}
    path.write_text(json.dumps(values, indent=1) + "\n")


def main() -> None:
    arguments = parse()
    workloads = [WORKLOADS[name] for name in arguments.workloads]
    records, limits = race(arguments, workloads)
    spin = "OpenMP's own" if arguments.spin_count is None else arguments.spin_count
    print(f"{arguments.models.name}, {arguments.threads} threads, {arguments.rounds} rounds, {platform.machine()}; "
          f"spin count {spin}")  # fmt: skip
    print(limits_line(limits), *notes(records), sep="\n")
    first = arguments.contestants[0]
    print(f"\nTokens per second, medians of {arguments.rounds} rounds; (x): {first} divided by this\n")
    print(comparison(records, workloads))
    if arguments.floor:
        ours = [name for name in records if CONTESTANTS[name].peer == TOPG]
        usual = [name for name in records if CONTESTANTS[name].peer == "transformers"]
        print(f"\nThe promise\n\n{floor(records, workloads, ours, usual)}")
    if arguments.json:
        write_json(arguments.json, records, limits)


if __name__ == "__main__":
    main()
