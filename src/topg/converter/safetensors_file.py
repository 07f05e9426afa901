"""The safetensors file format, and a checked, memory-mapped reader.

    8 bytes     length of the header, little-endian
    header      JSON: {name: {"dtype", "shape", "data_offsets": [begin, end]}, "__metadata__": {str: str}}
    data        the tensors without gaps, row-major, little-endian; offsets count from here

Format: https://huggingface.co/docs/safetensors.  Types go by ToPG's names ("bfloat16", not "BF16").
"""

from __future__ import annotations

import mmap
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from topg.converter.file_blocks import Bytes, check_rows, file_size, read_block
from topg.converter.strict_json import parse_object
from topg.errors import CheckpointError, UnsupportedModelError
from topg.wording import shown

AnyArray = npt.NDArray[Any]

LENGTH_BYTES = 8
MAX_HEADER_BYTES = 4 << 20  # some 30,000 tensors in one file
MAX_DIMENSIONS = 8
MAX_ELEMENTS = 2**48


@dataclass(frozen=True)
class ElementType:
    """One element type: ToPG's name, its size, and the numpy type its bytes are viewed as (None: numpy has none)."""

    name: str
    bits: int
    array: np.dtype[Any] | None


def _element(name: str, bits: int, array: str | None) -> ElementType:
    return ElementType(name, bits, np.dtype(array) if array else None)


ELEMENT_TYPES: Mapping[str, ElementType] = {
    "F64": _element("float64", 64, "<f8"),
    "F32": _element("float32", 32, "<f4"),
    "F16": _element("float16", 16, "<f2"),
    "BF16": _element("bfloat16", 16, "<u2"),  # bit patterns: numpy has no bfloat16
    "F8_E4M3": _element("float8_e4m3", 8, "u1"),
    "F8_E5M2": _element("float8_e5m2", 8, "u1"),
    "F8_E8M0": _element("float8_e8m0", 8, "u1"),
    "F8_E4M3FNUZ": _element("float8_e4m3fnuz", 8, "u1"),
    "F8_E5M2FNUZ": _element("float8_e5m2fnuz", 8, "u1"),
    "F6_E2M3": _element("float6_e2m3", 6, None),
    "F6_E3M2": _element("float6_e3m2", 6, None),
    "F4": _element("float4", 4, None),
    "I64": _element("int64", 64, "<i8"),
    "I32": _element("int32", 32, "<i4"),
    "I16": _element("int16", 16, "<i2"),
    "I8": _element("int8", 8, "i1"),
    "U64": _element("uint64", 64, "<u8"),
    "U32": _element("uint32", 32, "<u4"),
    "U16": _element("uint16", 16, "<u2"),
    "U8": _element("uint8", 8, "u1"),
    "BOOL": _element("bool", 8, "?"),
    "C64": _element("complex64", 64, "<c8"),
}
FORMAT_NAMES: Mapping[str, str] = {element.name: name for name, element in ELEMENT_TYPES.items()}


@dataclass(frozen=True)
class StoredTensor:
    """Where a tensor lies: its type by ToPG's name, its shape, and its bytes counted from the start of the file."""

    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int

    @property
    def element(self) -> ElementType:
        return ELEMENT_TYPES[FORMAT_NAMES[self.dtype]]


class SafetensorsFile:
    """An opened safetensors file whose header was checked; tensors are memory-mapped when first asked for.

    Opening raises ModelNotFoundError without a file, and CheckpointError with the file's name and what is wrong: a
    header that is no valid JSON or too long, an unknown type, offsets that overlap, leave gaps or do not fit their
    shape, or a file that is not exactly as long as its header says.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        size = file_size(self.path)
        header, data_start = _read_header(self.path, size)
        self.metadata: Mapping[str, str] = _checked_metadata(self.path, header.pop("__metadata__", {}))
        self.tensors: Mapping[str, StoredTensor] = {
            name: _checked_tensor(self.path, name, entry, data_start) for name, entry in header.items()
        }
        _check_layout(self.path, self.tensors, data_start, size)
        self._mapping: mmap.mmap | None = None

    @property
    def tensor_names(self) -> Collection[str]:
        """Names of all tensors, in the header's order."""
        return self.tensors.keys()

    def dtype(self, name: str) -> str:
        """Element type of a tensor by ToPG's name."""
        return self._tensor(name).dtype

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor."""
        return self._tensor(name).shape

    def array(self, name: str) -> AnyArray:
        """A read-only view of a tensor in the mapped file; bfloat16 comes as uint16, float8 as uint8 bit patterns.

        Valid as long as the view itself lives.  Raises UnsupportedModelError for types without whole bytes.
        """
        tensor = self._tensor(name)
        if self._mapping is None:
            with self.path.open("rb") as file:
                self._mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        raw = np.frombuffer(self._mapping, np.uint8, tensor.nbytes, tensor.offset)
        return self._typed(name, raw, tensor.shape)

    def release_memory(self) -> None:
        """Let the system take back the memory of what was read of the mapping; views stay valid and read again."""
        if self._mapping is not None and hasattr(mmap, "MADV_DONTNEED"):
            self._mapping.madvise(mmap.MADV_DONTNEED)

    def read_rows(self, name: str, start: int, stop: int) -> AnyArray:
        """A copy of rows start..stop (along the first dimension), typed as in `array`."""
        tensor = self._tensor(name)
        if not tensor.shape:
            raise CheckpointError(f"{self.path}: tensor {shown(name)} is a single number, where rows were expected")
        check_rows(name, start, stop, tensor.shape[0])
        row_bytes = tensor.nbytes // max(tensor.shape[0], 1)
        raw = read_block(self.path, tensor.offset + start * row_bytes, (stop - start) * row_bytes)
        return self._typed(name, raw, (stop - start, *tensor.shape[1:]))

    def _typed(self, name: str, raw: Bytes, shape: tuple[int, ...]) -> AnyArray:
        element = self._tensor(name).element
        if element.array is None:
            raise UnsupportedModelError(
                f"{self.path}: tensor {shown(name)} has type {element.name}, which cannot be read"
            )
        return raw.view(np.ndarray).view(element.array).reshape(shape)

    def _tensor(self, name: str) -> StoredTensor:
        if name not in self.tensors:
            raise CheckpointError(f"{self.path} has no tensor {shown(name)}")
        return self.tensors[name]


def _read_header(path: Path, size: int) -> tuple[dict[str, Any], int]:
    """The header as JSON, and the offset at which the data start."""
    if size < LENGTH_BYTES:
        raise CheckpointError(f"{path} is cut short: {size} bytes cannot hold a safetensors header")
    length = int(read_block(path, 0, LENGTH_BYTES).view("<u8")[0])
    if length > MAX_HEADER_BYTES:
        raise CheckpointError(
            f"{path} is no safetensors file: it claims a header of {length} bytes; at most {MAX_HEADER_BYTES} are read"
        )
    if length > size - LENGTH_BYTES:
        raise CheckpointError(f"{path} is cut short: its header has {length} bytes, the whole file {size}")
    text = read_block(path, LENGTH_BYTES, length).tobytes()
    return parse_object(text, f"the safetensors header of {path}"), LENGTH_BYTES + length


def _checked_metadata(path: Path, metadata: Any) -> dict[str, str]:
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise CheckpointError(f"{path}: __metadata__ must map names to strings")
    return metadata


def _checked_tensor(path: Path, name: str, entry: Any, data_start: int) -> StoredTensor:
    """One header entry; its extent agrees with its type and shape."""
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise CheckpointError(f"{path}: tensor {shown(name)} must have dtype, shape and data_offsets and nothing else")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in ELEMENT_TYPES:
        raise CheckpointError(f"{path}: tensor {shown(name)} has unknown type {shown(dtype)}")
    if not _are_sizes(shape) or len(shape) > MAX_DIMENSIONS or prod(dim or 1 for dim in shape) > MAX_ELEMENTS:
        raise CheckpointError(f"{path}: tensor {shown(name)} has an impossible shape {shown(shape)}")
    if not _are_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise CheckpointError(f"{path}: tensor {shown(name)} has impossible data_offsets {shown(offsets)}")
    bits = prod(shape) * ELEMENT_TYPES[dtype].bits
    nbytes = offsets[1] - offsets[0]
    if nbytes * 8 != bits:
        raise CheckpointError(
            f"{path}: tensor {shown(name)} takes {nbytes} bytes by its offsets, but {dtype} {shape} takes {bits / 8:g}"
        )
    return StoredTensor(ELEMENT_TYPES[dtype].name, tuple(shape), data_start + offsets[0], nbytes)


def _are_sizes(value: Any) -> bool:
    return isinstance(value, list) and all(type(item) is int and item >= 0 for item in value)


def _check_layout(path: Path, tensors: Mapping[str, StoredTensor], data_start: int, size: int) -> None:
    """Tensors follow each other without gap or overlap and fill the file exactly."""
    end = data_start
    for name, tensor in sorted(tensors.items(), key=lambda item: (item[1].offset, item[1].nbytes)):
        if tensor.offset != end:
            fault = "overlaps the tensor before it" if tensor.offset < end else "leaves a gap before it"
            raise CheckpointError(f"{path}: tensor {shown(name)} {fault}")
        end += tensor.nbytes
        if end > size:
            raise CheckpointError(f"{path} is cut short: tensor {shown(name)} ends at byte {end}, the file at {size}")
    if end != size:
        raise CheckpointError(f"{path} is {size - end} bytes longer than its header says")
