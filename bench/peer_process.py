"""The engines that `bench/peers.py` compares, and the process each of them runs in."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, cast

from peer_runners.protocol import Job, Measured, Setup

RUNNERS = Path(__file__).parent / "peer_runners"
TOPG, LLAMA_CPP = "topg", "llama.cpp"
SECONDS_TO_LOAD, SECONDS_TO_ANSWER = 900, 600


class PeerError(Exception):
    """A peer is not there, or could not do what it was asked; the text says which and why."""


@dataclass(frozen=True)
class Contestant:
    """An engine with one form of the model.

    peer     the engine; `--peer PEER=PATH` or the variable says where it is installed
    variant  what its runner understands by it: recipe, number type or compute type
    model    file or folder below the folder of models
    """

    peer: str
    variant: str
    model: str

    def __str__(self) -> str:
        return f"{self.peer}:{self.variant}"

    @property
    def runner(self) -> Path:
        return RUNNERS / f"run_{self.peer.replace('.', '_')}.py"


CONTESTANTS: Mapping[str, Contestant] = {
    str(contestant): contestant
    for contestant in (
        Contestant(TOPG, "int8", "q8_0.gguf"),
        Contestant(TOPG, "int4", "q8_0.gguf"),
        Contestant(TOPG, "bfloat16", "bf16.gguf"),
        Contestant(TOPG, "keep", "q8_0.gguf"),
        Contestant(LLAMA_CPP, "q8_0", "q8_0.gguf"),
        Contestant(LLAMA_CPP, "q4_0", "q4_0.gguf"),
        Contestant(LLAMA_CPP, "bf16", "bf16.gguf"),
        Contestant("openvino", "q8_0", "q8_0.gguf"),
        Contestant("openvino", "q4_0", "q4_0.gguf"),
        Contestant("openvino", "f16", "f16.gguf"),
        Contestant("ctranslate2", "int8", "ctranslate2-int8"),
        Contestant("vllm", "bfloat16", "huggingface"),
        Contestant("transformers", "bfloat16", "huggingface"),
        Contestant("transformers", "float32", "huggingface"),
    )
}


@dataclass(frozen=True)
class Installation:
    """Where a peer is: the Python that executes its runner, and for llama.cpp the folder of its tools."""

    python: str
    launcher: str

    @classmethod
    def find(cls, peer: str, given: Mapping[str, str]) -> Installation:
        """From `--peer`, else from TOPG_PEER_NAME; raises PeerError when it is nowhere or not what it should be."""
        variable = f"TOPG_PEER_{peer.upper().replace('.', '_')}"
        place = given.get(peer) or os.environ.get(variable) or (sys.executable if peer == TOPG else None)
        if place is None:
            raise PeerError(f"not installed: give --peer {peer}=PATH, or set {variable}")
        if peer == LLAMA_CPP:
            _require(Path(place) / "llama-bench")
            return cls(sys.executable, place)
        python = Path(place) / "bin" / "python" if Path(place).is_dir() else Path(place)
        return cls(str(_require(python)), place)


def _require(path: Path) -> Path:
    if not path.exists():
        raise PeerError(f"there is no {path}")
    return path


@dataclass(frozen=True)
class Load:
    """For what a peer is set up."""

    threads: int
    max_context: int
    max_streams: int
    spin_count: int | None

    def environment(self) -> dict[str, str]:
        """OpenMP's share of the settings; the rest is the peer's own default."""
        spinning = {} if self.spin_count is None else {"GOMP_SPINCOUNT": str(self.spin_count)}
        return dict(os.environ) | {"OMP_NUM_THREADS": str(self.threads)} | spinning


class PeerProcess:
    """A contestant, loaded; raises PeerError when it does not load."""

    def __init__(self, contestant: Contestant, models: Path, load: Load, given: Mapping[str, str]) -> None:
        installation = Installation.find(contestant.peer, given)
        model = _require(models / contestant.model)
        self._messages = tempfile.TemporaryFile("w+")  # noqa: SIM115  closed with the process
        self._process = subprocess.Popen(
            [installation.python, contestant.runner], env=load.environment(), text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._messages,
        )  # fmt: skip
        setup = Setup(
            str(model), contestant.variant, load.threads, load.max_context, load.max_streams, installation.launcher
        )
        loaded = self._ask(asdict(setup), SECONDS_TO_LOAD)
        self.version = str(loaded["version"])
        self.load_seconds = float(loaded["load_seconds"])
        self.peak_bytes = 0

    def measure(self, job: Job) -> Measured:
        """One job's figures; `peak_bytes` is then what the process has taken at most since it began."""
        answer = self._ask(asdict(job), SECONDS_TO_ANSWER)
        if "error" in answer:
            raise PeerError(str(answer["error"]))
        self.peak_bytes = int(answer.pop("peak_bytes"))
        return Measured(**answer)

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.communicate()
        self._messages.close()

    def __enter__(self) -> PeerProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _ask(self, question: Mapping[str, Any], seconds: float) -> dict[str, Any]:
        process = self._process
        assert process.stdin is not None and process.stdout is not None
        timer = threading.Timer(seconds, process.kill)
        timer.start()
        try:
            print(json.dumps(question), file=process.stdin, flush=True)
            line = process.stdout.readline()
        except BrokenPipeError:
            line = ""
        finally:
            timer.cancel()
        if not line:
            raise PeerError(f"its process ended, or took more than {seconds:.0f} s: {self._last_message()}")
        return cast(dict[str, Any], json.loads(line))

    def _last_message(self) -> str:
        self._messages.seek(0)
        return (self._messages.read().strip().splitlines() or ["it printed nothing"])[-1]
