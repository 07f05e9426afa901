"""Writing a folder all at once: it appears under its name when it is complete, or not at all.

    .NAME.lock       held by the one process that writes NAME; the system lets go of it when that process dies
    .NAME.partial    being written
    .NAME.replaced   what stood under NAME before, for the moment between two renames

All stand beside NAME.  What a killed process left is put right by the next run that writes NAME: a partial folder is
removed, a replaced one is put back when NAME is gone.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from topg.errors import CapacityError, ConfigError
from topg.files import sync, sync_folder

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@contextmanager
def staged_folder(target: Path, *, replace: bool = False) -> Iterator[Path]:
    """A new folder beside `target` that takes its name when the block ends, and is removed when the block fails.

    Raises ConfigError when `target` exists and `replace` is false or when someone else is writing it, CapacityError
    when the disk fills up.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    with _sole_writer(target):
        _recover(target)
        _require_absent(target, replace)
        partial = _beside(target, "partial")
        partial.mkdir()
        try:
            yield partial
            sync_folder(partial)
            _require_absent(target, replace)  # made meanwhile by other means
            _put_in_place(partial, target)
        except OSError as error:
            if error.errno in _NO_ROOM:
                raise CapacityError(f"no room left while writing {target} ({error}); free some space") from error
            raise
        finally:
            shutil.rmtree(partial, ignore_errors=True)  # gone already when all went well


@contextmanager
def _sole_writer(target: Path) -> Iterator[None]:
    """Hold the lock of `target` within the block; raises ConfigError when another process or thread holds it."""
    path = _beside(target, "lock")
    with _lock(path, target):
        try:
            yield
        finally:
            path.unlink()


def _lock(path: Path, target: Path) -> IO[bytes]:
    """The lock file, opened and locked; closing it lets go."""
    while True:
        file = path.open("ab")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            file.close()
            raise ConfigError(f"{target} is being written by someone else; wait, or give another name") from error
        if _is_at(file, path):
            return file
        file.close()  # its holder removed it between our two steps: what we locked is nobody's lock any more


def _is_at(file: IO[bytes], path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


def _require_absent(target: Path, replace: bool) -> None:
    if os.path.lexists(target) and not replace:
        raise ConfigError(f"{target} exists already; give another name, remove it, or ask for it to be overwritten")


def _put_in_place(partial: Path, target: Path) -> None:
    replaced = _beside(target, "replaced")
    if target.is_dir():
        target.rename(replaced)
    try:
        partial.rename(target)
    finally:
        if replaced.is_dir() and not os.path.lexists(target):
            replaced.rename(target)
    sync(target.parent)
    shutil.rmtree(replaced, ignore_errors=True)  # left over: the next run removes it


def _recover(target: Path) -> None:
    """Put right what a killed run left beside `target`; we hold the lock, so whoever made it is gone."""
    replaced, partial = _beside(target, "replaced"), _beside(target, "partial")
    if replaced.is_dir() and not os.path.lexists(target):
        replaced.rename(target)
    for leftover in (replaced, partial):
        if leftover.is_dir():
            shutil.rmtree(leftover)


def _beside(target: Path, kind: str) -> Path:
    return target.with_name(f".{target.name}.{kind}")
