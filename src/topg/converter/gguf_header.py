"""Reading the header of a GGUF file that may be damaged or hostile.

    magic "GGUF", version (u32), tensor count (u64), metadata count (u64)
    metadata    key (string), value type (u32), value        strings: length (u64), UTF-8
    tensors     name (string), rank (u32), dimensions (u64 each, fastest first), type (u32), offset (u64)

Everything is little-endian.  Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.

No length or count from the file is trusted: each is compared with the bytes that are left, and with a fixed limit,
before anything of that size is made.  What is built takes memory in proportion to what the file really holds.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from topg.errors import CheckpointError, UnsupportedModelError
from topg.wording import shown

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MAX_KEYS = 1 << 16
MAX_TENSORS = 1 << 17
MAX_KEY_BYTES = 65535
MAX_HEADER_BYTES = 256 << 20
MAX_ARRAY_ITEMS = 1 << 22
MAX_DIMENSIONS = 4
SMALLEST_KEY = 8 + 1 + 4 + 1  # bytes of the shortest metadata entry
SMALLEST_TENSOR = 8 + 1 + 4 + 8 + 4 + 8

STRING, ARRAY = 8, 9
SCALARS: Mapping[int, str] = {
    0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d",
}  # fmt: skip
BOOL = 7
_U64 = struct.Struct("<Q")


@dataclass(frozen=True)
class TensorInfo:
    """A tensor as the header states it: dimensions fastest first, type number, offset from the start of the data."""

    dims: tuple[int, ...]
    type_number: int
    offset: int


@dataclass(frozen=True)
class Header:
    """A parsed header; `end` is the first byte behind it.  Arrays are lists of plain Python values."""

    metadata: Mapping[str, Any]
    tensors: Mapping[str, TensorInfo]
    end: int


def parse_header(path: Path, data: memoryview) -> Header:
    """Parse the header at the start of `data`, the bytes of the file at `path`.

    Raises CheckpointError naming the file and the place for anything that is damaged, out of bounds or repeated;
    UnsupportedModelError for another version, for big-endian files and for arrays of arrays.
    """
    cursor = _Cursor(path, data[:MAX_HEADER_BYTES])
    _check_version(cursor)
    tensor_count = cursor.count(SMALLEST_TENSOR, MAX_TENSORS, "tensors", ahead=8)
    key_count = cursor.count(SMALLEST_KEY, MAX_KEYS, "metadata entries")
    metadata: dict[str, Any] = {}
    for index in range(key_count):
        key = cursor.name(f"metadata key {index}", metadata)
        metadata[key] = _read_value(cursor, f"metadata {shown(key)}")
    tensors: dict[str, TensorInfo] = {}
    for index in range(tensor_count):
        name = cursor.name(f"name of tensor {index}", tensors)
        tensors[name] = _read_tensor(cursor, f"tensor {shown(name)}")
    return Header(metadata, tensors, cursor.position)


class _Cursor:
    """A position in the header; every read is checked against what is left.  `what` says in errors what was read."""

    def __init__(self, path: Path, data: memoryview) -> None:
        self.path = path
        self.data = data
        self.position = 0
        self.array_items_left = MAX_ARRAY_ITEMS

    def fail(self, message: str) -> CheckpointError:
        return CheckpointError(f"{self.path}: {message}")

    @property
    def left(self) -> int:
        return len(self.data) - self.position

    def take(self, nbytes: int, what: str) -> memoryview:
        """The next bytes."""
        if nbytes > self.left:
            raise self.fail(f"{what} takes {nbytes} bytes, but the header has {self.left} left; the file is damaged")
        start = self.position
        self.position += nbytes
        return self.data[start : self.position]

    def u32(self, what: str) -> int:
        return int.from_bytes(self.take(4, what), "little")

    def u64(self, what: str) -> int:
        return int.from_bytes(self.take(8, what), "little")

    def count(self, smallest: int, limit: int, what: str, ahead: int = 0) -> int:
        """A number of things of at least `smallest` bytes each, which stand in the file `ahead` bytes further on."""
        number = self.u64(f"number of {what}")
        if number > limit or number * smallest > self.left - ahead:
            raise self.fail(f"{number} {what} do not fit; the file is damaged, or has more than {limit}")
        return number

    def text(self, what: str) -> str:
        """A string."""
        return self.decode(self.take(self.u64(f"length of {what}"), what), what)

    def name(self, what: str, taken: Mapping[str, Any]) -> str:
        """A key or tensor name: a string of bounded length, not empty, not seen before."""
        length = self.u64(f"length of {what}")
        if not 1 <= length <= MAX_KEY_BYTES:
            raise self.fail(f"{what} is {length} bytes long; names have 1 to {MAX_KEY_BYTES}")
        name = self.decode(self.take(length, what), what)
        if name in taken:
            raise self.fail(f"{what}, {shown(name)}, occurs twice")
        return name

    def decode(self, raw: memoryview, what: str) -> str:
        try:
            return str(raw, "utf-8")
        except UnicodeDecodeError as error:
            raise self.fail(f"{what} is not valid UTF-8") from error


def _check_version(cursor: _Cursor) -> None:
    magic = bytes(cursor.take(4, "the magic number"))
    if magic != MAGIC:
        raise cursor.fail(f"not a GGUF file: it starts with {shown(magic)}, not {MAGIC!r}")
    raw = cursor.take(4, "the version")
    version, swapped = int.from_bytes(raw, "little"), int.from_bytes(raw, "big")
    if version in VERSIONS:
        return
    if swapped <= max(VERSIONS) and version > swapped:
        raise UnsupportedModelError(f"{cursor.path}: a big-endian GGUF file; only little-endian ones are read")
    raise UnsupportedModelError(
        f"{cursor.path}: GGUF version {version}; versions {', '.join(map(str, VERSIONS))} are read:"
        " convert the original model again with a current tool"
    )


def _read_value(cursor: _Cursor, what: str) -> Any:
    kind = cursor.u32(f"type of {what}")
    if kind == STRING:
        return cursor.text(what)
    if kind == ARRAY:
        return _read_array(cursor, what)
    return _read_scalars(cursor, kind, 1, what)[0]


def _read_array(cursor: _Cursor, what: str) -> list[Any]:
    kind = cursor.u32(f"item type of {what}")
    length = cursor.u64(f"length of {what}")
    if kind == ARRAY:
        raise UnsupportedModelError(f"{cursor.path}: {what} is an array of arrays, which is not read")
    if length > cursor.array_items_left:
        raise cursor.fail(f"{what} has {length} items; all arrays together may have {MAX_ARRAY_ITEMS}")
    cursor.array_items_left -= length
    return _read_strings(cursor, length, what) if kind == STRING else _read_scalars(cursor, kind, length, what)


def _read_strings(cursor: _Cursor, count: int, what: str) -> list[str]:
    """A list of strings.  A plain loop over local names: a vocabulary has hundreds of thousands."""
    data, position, end = cursor.data, cursor.position, len(cursor.data)
    read_length = _U64.unpack_from
    strings: list[str] = []
    for index in range(count):
        start = position + 8
        if start > end or (position := start + read_length(data, position)[0]) > end:
            raise cursor.fail(f"{what}[{index}] goes past the end of the header; the file is damaged")
        try:
            strings.append(str(data[start:position], "utf-8"))
        except UnicodeDecodeError as error:
            raise cursor.fail(f"{what}[{index}] is not valid UTF-8") from error
    cursor.position = position
    return strings


def _read_scalars(cursor: _Cursor, kind: int, count: int, what: str) -> list[Any]:
    if kind not in SCALARS:
        raise cursor.fail(f"{what} has value type {kind}, which GGUF does not have")
    code = SCALARS[kind]
    raw = cursor.take(count * struct.calcsize(f"<{code}"), what)
    if kind == BOOL and max(raw, default=0) > 1:
        raise cursor.fail(f"{what} holds {max(raw)} where only false (0) and true (1) are allowed")
    return list(struct.unpack(f"<{count}{code}", raw))


def _read_tensor(cursor: _Cursor, what: str) -> TensorInfo:
    rank = cursor.u32(f"number of dimensions of {what}")
    if not 1 <= rank <= MAX_DIMENSIONS:
        raise cursor.fail(f"{what} has {rank} dimensions; 1 to {MAX_DIMENSIONS} are allowed")
    dims = tuple(cursor.u64(f"dimension {index} of {what}") for index in range(rank))
    return TensorInfo(dims, cursor.u32(f"type of {what}"), cursor.u64(f"offset of {what}"))
