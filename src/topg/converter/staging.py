"""Writing a folder all at once: it appears under its name when it is complete, or not at all.

    .NAME.partial-PID    being written by process PID
    .NAME.replaced-PID   what stood under NAME before, for the moment between two renames

Both stand beside NAME.  What a killed process left is put right by the next run that writes NAME: a partial folder is
removed, a replaced one is put back when NAME is gone.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from topg.errors import CapacityError, ConfigError

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@contextmanager
def staged_folder(target: Path, *, replace: bool = False) -> Iterator[Path]:
    """A new folder beside `target` that takes its name when the block ends, and is removed when the block fails.

    Raises ConfigError when `target` exists and `replace` is false, CapacityError when the disk fills up.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    _recover(target)
    _require_absent(target, replace)
    partial = _beside(target, "partial")
    partial.mkdir()
    try:
        yield partial
        _sync_folder(partial)
        _require_absent(target, replace)  # another process may have been faster
        _put_in_place(partial, target)
    except OSError as error:
        if error.errno in _NO_ROOM:
            raise CapacityError(f"no room left while writing {target} ({error}); free some space") from error
        raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)  # gone already when all went well


def require_free_space(folder: Path, nbytes: int) -> None:
    """Raises CapacityError when the disk of `folder` (or of its nearest existing parent) has no room for `nbytes`."""
    existing = next(parent for parent in (folder, *folder.resolve().parents) if parent.is_dir())
    free = shutil.disk_usage(existing).free
    if free < nbytes:
        raise CapacityError(
            f"{folder} needs {nbytes / 1e9:.2f} GB, its disk has {free / 1e9:.2f} GB free; free some space, write"
            " elsewhere, or choose a smaller precision"
        )


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
    _sync(target.parent)
    shutil.rmtree(replaced, ignore_errors=True)  # left over: the next run removes it


def _recover(target: Path) -> None:
    """Put right what killed runs left beside `target`."""
    for kind in ("replaced", "partial"):
        for leftover in target.parent.glob(f".{_escaped(target.name)}.{kind}-*"):
            if not leftover.is_dir() or _is_running(leftover.name.rpartition("-")[2]):
                continue
            if kind == "replaced" and not os.path.lexists(target):
                leftover.rename(target)
            else:
                shutil.rmtree(leftover)


def _beside(target: Path, kind: str) -> Path:
    return target.with_name(f".{target.name}.{kind}-{os.getpid()}")


def _escaped(name: str) -> str:
    """A file name as a pattern that matches only itself."""
    return "".join(f"[{character}]" if character in "*?[" else character for character in name)


def _is_running(pid: str) -> bool:
    """Whether a process of this machine has this id; what is not a process id counts as running: it is not ours."""
    if not pid.isdecimal():
        return True
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return int(pid) != os.getpid()  # our own id on a folder we have not made yet: its maker is dead


def _sync_folder(folder: Path) -> None:
    """Make the files of a folder, and their names, survive a power failure."""
    for path in (*folder.iterdir(), folder):
        _sync(path)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
