"""Writing a safetensors file larger than memory, block by block."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

import numpy as np

from topg.converter.safetensors_file import ELEMENT_TYPES, FORMAT_NAMES, LENGTH_BYTES, AnyArray
from topg.errors import CheckpointError
from topg.precision.formats import BYTES, Part

ALIGNMENT = 64
READ_BACK_BYTES = 1 << 20


class SafetensorsWriter:
    """Writes a new file: the header at once, then every tensor's rows in order, several tensors interleaved if need be.

    The data start at a multiple of 64 bytes.  The format allows no gaps, so tensors whose size is a multiple of 64
    bytes come first, in the given order and all aligned to 64; the others follow, aligned to their own elements.

    Used as a context manager.  Leaving it normally checks that every tensor is complete and puts the file on disk
    (fsync); leaving it by an exception, an incomplete tensor included, deletes the file.

        with SafetensorsWriter(path, {"x.codes": Part("int8", (512, 64))}, {}) as writer:
            writer.write("x.codes", first_rows)
            writer.write("x.codes", other_rows)
        writer.sha256
    """

    def __init__(self, path: str | Path, parts: Mapping[str, Part], metadata: Mapping[str, str]) -> None:
        """Raises CheckpointError if the file exists; ValueError for a part without rows or with a taken name."""
        self.path = Path(path)
        self._parts = {name: parts[name] for name in _file_order(parts)}
        header, self._offsets = _build_header(self._parts, metadata)
        self._rows_written = dict.fromkeys(self._parts, 0)
        self._digest = hashlib.sha256()
        self._pending = list(self._parts)  # parts not hashed to their end yet, in file order
        self._hashed = 0
        self._finished = False
        try:
            self._file: BinaryIO = self.path.open("x+b")
        except FileExistsError as error:
            raise CheckpointError(f"{self.path} exists already and is not overwritten") from error
        self._store(0, header)
        self._digest.update(header)
        self._hashed = len(header)

    def write(self, name: str, rows: AnyArray) -> None:
        """Append rows [n, ...] to a tensor; bfloat16 values are given as uint16 bit patterns.

        Raises ValueError if the name, the type, the shape or the number of rows is not what was announced.
        """
        part, done = self._parts[name], self._rows_written[name]
        wanted = ELEMENT_TYPES[FORMAT_NAMES[part.dtype]].array
        if rows.dtype != wanted or rows.shape[1:] != part.shape[1:] or done + len(rows) > part.shape[0]:
            raise ValueError(
                f"tensor {name!r} takes {wanted} {list(part.shape)} and has {done} rows;"
                f" {rows.dtype} {list(rows.shape)} does not fit"
            )
        offset = self._offsets[name] + done * _row_bytes(part)
        block = np.ascontiguousarray(rows).tobytes()
        self._store(offset, block)
        if offset == self._hashed:
            self._digest.update(block)
            self._hashed += len(block)
        self._rows_written[name] = done + len(rows)
        self._catch_up()

    @property
    def sha256(self) -> str:
        """Hash of the finished file, in hexadecimal."""
        if not self._finished:
            raise ValueError(f"{self.path} is not finished")
        return self._digest.hexdigest()

    def close(self) -> None:
        """Check that nothing is missing and put the file on disk; raises CheckpointError naming what is."""
        for name, part in self._parts.items():
            if self._rows_written[name] != part.shape[0]:
                raise CheckpointError(
                    f"{self.path}: only {self._rows_written[name]} of {part.shape[0]} rows of {name!r} were written"
                )
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        self._finished = True

    def __enter__(self) -> SafetensorsWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self.close()
        finally:
            if not self._finished:
                self._discard()

    def _discard(self) -> None:
        try:
            self._file.close()
        finally:  # on a full disk closing fails as well
            self.path.unlink()

    def _store(self, offset: int, block: bytes) -> None:
        self._file.seek(offset)
        self._file.write(block)

    def _catch_up(self) -> None:
        """Hash what stands in the file behind the hashed part without a hole: tensors written out of turn."""
        while self._pending:
            name = self._pending[0]
            written = self._offsets[name] + self._rows_written[name] * _row_bytes(self._parts[name])
            self._hash_from_file(written)
            if self._rows_written[name] < self._parts[name].shape[0]:
                return
            self._pending.pop(0)

    def _hash_from_file(self, end: int) -> None:
        while self._hashed < end:
            self._file.seek(self._hashed)
            block = self._file.read(min(READ_BACK_BYTES, end - self._hashed))
            self._digest.update(block)
            self._hashed += len(block)


def _file_order(parts: Mapping[str, Part]) -> list[str]:
    """Names so that every tensor is aligned: whole multiples of 64 bytes first, then falling element size."""

    def alignment(name: str) -> int:
        return ALIGNMENT if parts[name].nbytes % ALIGNMENT == 0 else BYTES[parts[name].dtype]

    return sorted(parts, key=alignment, reverse=True)


def _build_header(parts: Mapping[str, Part], metadata: Mapping[str, str]) -> tuple[bytes, dict[str, int]]:
    """The file's first bytes up to the data, and every tensor's offset in the file."""
    entries: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    offsets: dict[str, int] = {}
    end = 0
    for name, part in parts.items():
        if not part.shape or name == "__metadata__":
            raise ValueError(f"tensor {name!r} {list(part.shape)} cannot be stored: it needs rows and another name")
        entries[name] = {
            "dtype": FORMAT_NAMES[part.dtype], "shape": list(part.shape), "data_offsets": [end, end + part.nbytes],
        }  # fmt: skip
        offsets[name] = end
        end += part.nbytes
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-(LENGTH_BYTES + len(text)) % ALIGNMENT)
    header = len(text).to_bytes(LENGTH_BYTES, "little") + text
    return header, {name: len(header) + offset for name, offset in offsets.items()}


def _row_bytes(part: Part) -> int:
    return part.nbytes // max(part.shape[0], 1)
