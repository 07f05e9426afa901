"""Opens checkpoint files under a hard memory limit, as its own process: `python limited_open.py MEGABYTES FILE...`.

Prints one JSON object, outcome by file: "opened", or the error's class and message.  Any exception that is not a
ModelError ends the process, and so does needing more memory than the limit on top of what the imports took.
Linux only.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

CPU_SECONDS = 60
ROOT = Path(__file__).parents[2]


def open_all(files: Sequence[Path], megabytes: int = 200) -> dict[str, str]:
    """Outcome of every file, from a process of its own with that much memory."""
    command = [sys.executable, __file__, str(megabytes), *map(str, files)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env={"PYTHONPATH": str(ROOT / "src")})
    assert done.returncode == 0, done.stderr
    outcomes: dict[str, str] = json.loads(done.stdout)
    return outcomes


def limit_memory(megabytes: int) -> None:
    """Let this process grow by `megabytes` and no more (Linux only)."""
    import resource

    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + (megabytes << 20)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS))


def _outcome(path: Path) -> str:
    from topg.converter.gguf_file import GgufFile
    from topg.converter.safetensors_file import SafetensorsFile
    from topg.errors import ModelError

    try:
        GgufFile(path) if path.suffix == ".gguf" else SafetensorsFile(path)
    except ModelError as error:
        return f"{type(error).__name__}: {error}"
    return "opened"


def _main(megabytes: str, *names: str) -> None:
    import gguf  # noqa: F401  # imported before the limit is set, so that the limit is about the files alone

    import topg.converter.source  # noqa: F401

    limit_memory(int(megabytes))
    print(json.dumps({name: _outcome(Path(name)) for name in names}))


if __name__ == "__main__":
    _main(*sys.argv[1:])
