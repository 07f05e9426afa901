"""How long-running verbs show how far they are: one bar at a time on standard error, where that is a terminal."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, NoReturn

from topg.wording import printable

if TYPE_CHECKING:
    from tqdm import tqdm


class ProgressBar:
    """The bar of the work under way; a file or pipe gets none."""

    def __init__(self) -> None:
        self._bar: tqdm[NoReturn] | None = None
        self._what = ""

    def show(self, what: str, done: int, total: int) -> None:
        """`done` of `total` bytes of `what` are there; the bar of anything else ends."""
        if not sys.stderr.isatty():
            return
        if self._bar is None or what != self._what:
            self.close()
            self._bar, self._what = _new_bar(what, total), what
        self._bar.update(done - self._bar.n)
        if done == total:
            self.close()

    def close(self) -> None:
        """End the bar's line, so that what is printed next stands on its own."""
        if self._bar is not None:
            self._bar.close()
        self._bar = None


@contextmanager
def progress_bar() -> Iterator[ProgressBar]:
    """A bar whose line is ended however the block ends."""
    bar = ProgressBar()
    try:
        yield bar
    finally:
        bar.close()


def _new_bar(what: str, total: int) -> tqdm[NoReturn]:
    from tqdm import tqdm

    return tqdm(total=total, unit="B", unit_scale=True, desc=printable(what), file=sys.stderr)
