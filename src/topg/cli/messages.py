"""What the command line says on standard error: one line a message, safe to print, in plain words."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Mapping
from types import MappingProxyType

from topg.wording import printable

_OS_ERRORS: Mapping[int, str] = MappingProxyType(
    {
        errno.ENOENT: "there is nothing under this name; check its spelling",
        errno.ENOTDIR: "a file stands where a folder is needed; choose another path",
        errno.EISDIR: "this is a folder, and a file is needed",
        errno.EEXIST: "this exists already; choose another name, or remove it",
        errno.ENOTEMPTY: "this folder is not empty; choose another name, or remove it",
        errno.ENAMETOOLONG: "this name is too long for the disk; choose a shorter one",
        errno.ELOOP: "its symbolic links lead in a circle; name the file itself",
        errno.EROFS: "the disk is read-only; choose a folder on another one",
        errno.EACCES: "there is no permission for this; change the permissions, or choose another path",
        errno.EPERM: "there is no permission for this; change the permissions, or choose another path",
        errno.ENOSPC: "there is no space left on the disk; make room, or choose a folder on another one",
        errno.EDQUOT: "the disk quota is used up; make room, or choose a folder on another disk",
    }
)


def say(text: str) -> None:
    """Print one message on standard error: always one line, whatever names and texts of others are in it."""
    print(printable(text), file=sys.stderr, flush=True)


def explain(error: OSError) -> str:
    """An error of the system: the path it is about, what is wrong, and what to do."""
    if error.errno is None:
        return str(error)
    said = _OS_ERRORS.get(error.errno, error.strerror or str(error))
    paths = [_shown(path) for path in (error.filename, error.filename2) if path is not None]
    return ": ".join([*([" -> ".join(paths)] if paths else []), said])


def _shown(path: object) -> str:
    return os.fsdecode(path) if isinstance(path, (str, bytes, os.PathLike)) else f"file descriptor {path}"
