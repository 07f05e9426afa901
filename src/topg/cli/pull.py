"""`topg pull`: fetch a model into the store."""

from __future__ import annotations

import argparse
import re
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from topg.errors import ModelNotFoundError
from topg.hub.catalogue import CATALOGUE
from topg.hub.huggingface import HUB_PREFIX, HubSpec, pull_huggingface
from topg.hub.pull import add_local, pull_catalogue
from topg.hub.store import Store
from topg.paths import Home
from topg.units import format_size

HELP = "fetch a model into the store"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model", metavar="MODEL",
        help="a name of the catalogue below, hf:ORG/NAME[@REVISION] for a repository of the Hugging Face hub, or the "
        "path of a GGUF file or checkpoint folder to copy",
    )  # fmt: skip
    parser.add_argument("--name", help="with a path: the name to keep it under (default: that of the file or folder)")
    entries = (
        f"  {model.name:<14} {model.title}, {format_size(model.transfer_size)}, {model.licence}"
        for model in CATALOGUE.values()
    )
    parser.epilog = "\n".join(["catalogue:", *entries])


def run(args: argparse.Namespace) -> int:
    store = Store(Home.find())
    with terminal_report() as report:
        path = _pull(args.model, args.name, store, report)
    print(path)
    return 0


def _pull(model: str, name: str | None, store: Store, report: TerminalReport) -> Path:
    path = Path(model).expanduser()
    if name is not None and (model in CATALOGUE or model.startswith(HUB_PREFIX)):
        raise ModelNotFoundError(f"--name goes with a path only, and {model!r} is none")
    if model in CATALOGUE:
        return pull_catalogue(CATALOGUE[model], store, report)
    if model.startswith(HUB_PREFIX):
        return pull_huggingface(HubSpec.parse(model), store, report)
    if path.exists():
        return add_local(path, name or _name_of(path), store, report, _verify)
    raise ModelNotFoundError(
        f"{model!r} is no name of the catalogue ({', '.join(CATALOGUE)}), no hf:ORG/NAME, and no path that exists"
    )


def _name_of(path: Path) -> str:
    """A store name from a path's last part: what a name cannot hold becomes '-'."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", path.absolute().stem if path.is_file() else path.absolute().name)


def _verify(path: Path) -> None:
    """Raises when `path` is no checkpoint that can be converted."""
    from topg.converter.blueprint import draw_blueprint
    from topg.converter.source import open_source
    from topg.precision.recipes import DEFAULT_RECIPE

    draw_blueprint(open_source(path), DEFAULT_RECIPE)


@contextmanager
def terminal_report() -> Iterator[TerminalReport]:
    """A report on standard error, whose last line is ended however the block ends."""
    report = TerminalReport()
    try:
        yield report
    finally:
        report.end_line()


class TerminalReport:
    """Shows the course of a pull on standard error: a line that moves on a terminal, one line a file elsewhere."""

    def __init__(self) -> None:
        self._live = sys.stderr.isatty()
        self._line_is_open = False
        self._shown_at = 0.0

    def end_line(self) -> None:
        """Let what is printed next start on a line of its own."""
        if self._line_is_open:
            print(file=sys.stderr)
        self._line_is_open = False

    def note(self, text: str) -> None:
        self.end_line()
        print(text, file=sys.stderr)

    def progress(self, what: str, done: int, total: int) -> None:
        finished = done == total
        now = time.monotonic()
        if not finished and (not self._live or now - self._shown_at < 0.1):
            return
        self._shown_at = now
        line = f"{what}: {format_size(done)} of {format_size(total)}"
        print(f"\r\x1b[K{line}" if self._live else line, end="", file=sys.stderr, flush=True)
        self._line_is_open = True
        if finished:
            self.end_line()
