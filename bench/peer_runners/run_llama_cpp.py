"""llama.cpp by its own tools: llama-bench for one stream, llama-batched-bench for several.

Their figures are means, of forward passes alone: no sampling, no text.  The launcher is the folder of the tools.
"""

from __future__ import annotations

import json
import resource
import subprocess
from pathlib import Path
from typing import Any

from protocol import Job, Measured, Setup, serve


class LlamaCpp:
    """Starts the tools anew for each job; they load the model and warm up outside the time they report."""

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self.version = self._tool("llama-bench", "-p", "1", "-n", "0", "-r", "1", "-o", "jsonl")[0]["build_commit"]

    def measure(self, job: Job) -> Measured:
        return self._one_stream(job) if job.streams == 1 else self._streams(job)

    def peak_bytes(self) -> int:
        return resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024

    def _one_stream(self, job: Job) -> Measured:
        prefill = self._bench("-p", str(job.prompt_tokens), "-n", "0")
        seconds = job.prompt_tokens / prefill
        if job.new_tokens == 1:
            return Measured(seconds)
        decode = self._bench("-p", "0", "-n", str(job.new_tokens - 1), "-d", str(job.prompt_tokens))
        return Measured(seconds, decode)

    def _bench(self, *arguments: str) -> float:
        """Tokens per second."""
        return float(self._tool("llama-bench", *arguments, "-r", "1", "-o", "jsonl")[0]["avg_ts"])

    def _streams(self, job: Job) -> Measured:
        context = job.streams * (job.prompt_tokens + job.new_tokens)
        result = self._tool(
            "llama-batched-bench", "-npp", str(job.prompt_tokens), "-ntg", str(job.new_tokens - 1),
            "-npl", str(job.streams), "-c", str(context), "--output-format", "jsonl",
        )[0]  # fmt: skip
        return Measured(result["t_pp"], result["speed_tg"])

    def _tool(self, name: str, *arguments: str) -> list[dict[str, Any]]:
        program = Path(self._setup.launcher) / name
        common = ["-m", self._setup.model, "-t", str(self._setup.threads)]
        run = subprocess.run([program, *common, *arguments], capture_output=True, text=True, check=False)
        if run.returncode:
            raise RuntimeError(f"{name} ended with {run.returncode}: {run.stderr[-300:]}")
        return [json.loads(line) for line in run.stdout.splitlines() if line.startswith("{")]


if __name__ == "__main__":
    serve(LlamaCpp)
