"""A GGUF file: its metadata, and its tensors as raw blocks or dequantised rows.

The names and block sizes of tensor types, and their arithmetic, come from the `gguf` package; nothing else of it is
used: the header is parsed by `gguf_header`, which trusts no length in the file.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from math import prod
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from topg.converter.file_blocks import Bytes, check_rows, file_size, read_block
from topg.converter.gguf_header import TensorInfo, parse_header
from topg.errors import CheckpointError, UnsupportedModelError
from topg.wording import shown

DEFAULT_ALIGNMENT = 32
MAX_ALIGNMENT = 1 << 20
MAX_ELEMENTS = 2**48
DEQUANTISED_TYPES = (  # all that the `gguf` package, 0.19, turns into float32
    "F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K",
    "IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ4_NL", "IQ4_XS",
    "TQ1_0", "TQ2_0", "MXFP4", "NVFP4",
)  # fmt: skip


@dataclass(frozen=True)
class GgufTensor:
    """A stored tensor: type by ggml's name ("Q4_K"), shape with rows first, bytes counted from the start of the file.

    It is a matrix of `rows` rows of `row_bytes` bytes; a vector is one row.
    """

    type_name: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int

    @property
    def rows(self) -> int:
        """Product of all dimensions but the last."""
        return prod(self.shape[:-1])

    @property
    def row_bytes(self) -> int:
        return self.nbytes // self.rows


class GgufFile:
    """An opened and checked GGUF file.

    Opening raises ModelNotFoundError without a file, CheckpointError with the file's name and what is wrong for
    anything damaged, and UnsupportedModelError for versions and tensor types that are not known.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        size = file_size(self.path)
        if size == 0:
            raise CheckpointError(f"{self.path} is empty")
        header = parse_header(self.path, np.memmap(self.path, np.uint8, mode="r").data)
        alignment = _alignment(self.path, header.metadata)
        data_start = -(-header.end // alignment) * alignment
        self.metadata: Mapping[str, Any] = header.metadata
        self.tensors: Mapping[str, GgufTensor] = {
            name: _checked_tensor(f"{self.path}: tensor {shown(name)}", info, data_start, alignment, size)
            for name, info in header.tensors.items()
        }
        _check_no_overlap(self.path, self.tensors)

    def tensor(self, name: str) -> GgufTensor:
        """A tensor by name; raises CheckpointError when there is none."""
        if name not in self.tensors:
            raise CheckpointError(f"{self.path} has no tensor {shown(name)}")
        return self.tensors[name]

    def read_raw(self, name: str, rows: slice) -> Bytes:
        """A copy of the blocks of some rows, [n, row_bytes]."""
        tensor = self.tensor(name)
        start, stop = rows.start or 0, tensor.rows if rows.stop is None else rows.stop
        check_rows(name, start, stop, tensor.rows)
        block = read_block(self.path, tensor.offset + start * tensor.row_bytes, (stop - start) * tensor.row_bytes)
        return block.reshape(stop - start, tensor.row_bytes)

    def check_type(self, name: str) -> None:
        """Raises UnsupportedModelError unless `dequantise` knows the tensor's type."""
        if self.tensor(name).type_name not in DEQUANTISED_TYPES:
            raise UnsupportedModelError(
                f"{self.path}: tensor {shown(name)} has type {self.tensor(name).type_name}; known are"
                f" {', '.join(DEQUANTISED_TYPES)}: quantise the original model to one of these"
            )

    def dequantise(self, name: str, rows: slice = slice(None)) -> npt.NDArray[np.float32]:
        """Some rows in float32, [n, columns]; memory in proportion to n."""
        from gguf import GGMLQuantizationType
        from gguf.quants import dequantize

        self.check_type(name)
        tensor = self.tensor(name)
        blocks = self.read_raw(name, rows)
        if not len(blocks):
            return np.empty((0, tensor.shape[-1]), np.float32)
        values = dequantize(blocks, GGMLQuantizationType[tensor.type_name])
        return cast(npt.NDArray[np.float32], values.reshape(len(blocks), tensor.shape[-1]))


def _alignment(path: Path, metadata: Mapping[str, Any]) -> int:
    value = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if type(value) is not int or not 1 <= value <= MAX_ALIGNMENT or value & (value - 1):
        raise CheckpointError(
            f"{path}: general.alignment must be a power of two up to {MAX_ALIGNMENT}, not {shown(value)}"
        )
    return value


def _checked_tensor(what: str, info: TensorInfo, data_start: int, alignment: int, size: int) -> GgufTensor:
    """Resolve type and place; the extent lies within the file."""
    type_name, block_values, block_bytes = _type_of(what, info.type_number)
    if not all(1 <= dim <= MAX_ELEMENTS for dim in info.dims) or prod(info.dims) > MAX_ELEMENTS:
        raise CheckpointError(f"{what} has impossible dimensions {list(info.dims)}")
    if info.dims[0] % block_values:
        raise CheckpointError(
            f"{what} has rows of {info.dims[0]} values, which cannot be cut into {type_name} blocks of {block_values}"
        )
    if info.offset % alignment:
        raise CheckpointError(f"{what} starts at offset {info.offset}, not a multiple of the alignment {alignment}")
    offset, nbytes = data_start + info.offset, prod(info.dims) // block_values * block_bytes
    if offset + nbytes > size:
        raise CheckpointError(f"{what} ends at byte {offset + nbytes}, the file at {size}: it is cut short or damaged")
    return GgufTensor(type_name, info.dims[::-1], offset, nbytes)


def _type_of(what: str, number: int) -> tuple[str, int, int]:
    """Name, values per block and bytes per block of a tensor type."""
    known = _known_types()
    if number not in known:
        raise UnsupportedModelError(f"{what} has type number {number}, which is not known")
    return known[number]


@cache
def _known_types() -> Mapping[int, tuple[str, int, int]]:
    from gguf import GGML_QUANT_SIZES

    return {int(kind): (kind.name, *sizes) for kind, sizes in GGML_QUANT_SIZES.items()}


def _check_no_overlap(path: Path, tensors: Mapping[str, GgufTensor]) -> None:
    end = 0
    for name, tensor in sorted(tensors.items(), key=lambda item: item[1].offset):
        if tensor.offset < end:
            raise CheckpointError(f"{path}: tensor {shown(name)} overlaps the tensor before it")
        end = tensor.offset + tensor.nbytes
