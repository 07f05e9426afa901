"""A lock between processes.  The operating system drops it when its holder dies, however that happens."""

from __future__ import annotations

import fcntl
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

POLL_SECONDS = 0.1


@contextmanager
def file_lock(path: Path, on_wait: Callable[[], None]) -> Iterator[None]:
    """Hold the lock of `path` within the block, waiting as long as another process holds it.

    `on_wait` is called once when there is someone to wait for.  The lock file stays: removing it would let two holders
    in, one with the old file and one with the new.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as file:
        waited = False
        while not _try_lock(file):
            if not waited:
                on_wait()
            waited = True
            time.sleep(POLL_SECONDS)
        yield  # closing the file drops the lock


def _try_lock(file: IO[bytes]) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
