"""Arrays as they are stored: number formats, packed nibbles, and blocks of rows that stay in the cache."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from topg.errors import PrecisionError
from topg.precision.bfloat16 import from_bfloat16, to_bfloat16
from topg.precision.formats import Precision, StorageType

Parts = dict[str, NDArray[Any]]

_WEIGHTS_AT_A_TIME = 1 << 16  # 256 KiB of float32 and a few intermediates fit a core's second-level cache
_NUMPY_TYPES: Mapping[StorageType, type[np.generic]] = {
    "float32": np.float32,
    "float16": np.float16,
    "bfloat16": np.uint16,
    "int8": np.int8,
    "uint8": np.uint8,
}


def numpy_dtype(storage: StorageType) -> np.dtype[Any]:
    """The numpy type that holds `storage`; bfloat16 is held as uint16 bit patterns."""
    return np.dtype(_NUMPY_TYPES[storage])


def encode(values: NDArray[np.float32], storage: StorageType) -> NDArray[Any]:
    """float32 -> a floating-point storage type, rounded to nearest even; too large values become infinite."""
    if storage == "bfloat16":
        return to_bfloat16(values)
    with np.errstate(over="ignore"):
        return values.astype(_NUMPY_TYPES[storage])


def decode(stored: NDArray[Any], storage: StorageType) -> NDArray[np.float32]:
    """A floating-point storage type -> float32, exact."""
    if storage == "bfloat16":
        return from_bfloat16(stored)
    return stored.astype(np.float32)


def rounded(values: NDArray[np.float32], storage: StorageType) -> NDArray[np.float32]:
    """What `values` become by being stored: float32 rounded to `storage` and back."""
    return decode(encode(values, storage), storage)


def plain_storage(precision: Precision) -> StorageType:
    """How the values of a precision without groups are stored."""
    return precision.parts(())["values"].dtype


def allocate(precision: Precision, shape: tuple[int, ...]) -> Parts:
    """Uninitialised arrays for a tensor of `shape`, exactly as `Precision.parts` describes them."""
    return {name: np.empty(part.shape, numpy_dtype(part.dtype)) for name, part in precision.parts(shape).items()}


def check_parts(parts: Mapping[str, NDArray[Any]], precision: Precision, shape: tuple[int, ...]) -> None:
    """Raise PrecisionError unless `parts` are what a tensor of `shape` in `precision` is stored as."""
    expected = precision.parts(shape)
    if parts.keys() != expected.keys():
        raise PrecisionError(
            f"{precision.describe()} is stored as {', '.join(expected)}; given: {', '.join(parts) or 'nothing'}"
        )
    for name, part in expected.items():
        given, dtype = parts[name], numpy_dtype(part.dtype)
        if given.shape != part.shape or given.dtype != dtype:
            raise PrecisionError(
                f"part {name!r} of a {precision.describe()} tensor {list(shape)} is {given.dtype} "
                f"{list(given.shape)}; it must be {dtype} {list(part.shape)}"
            )


def row_blocks(rows: int, columns: int) -> Iterator[slice]:
    """Cut `rows` of `columns` weights into blocks whose intermediates stay in the cache."""
    step = max(1, _WEIGHTS_AT_A_TIME // max(1, columns))
    for start in range(0, rows, step):
        yield slice(start, min(start + step, rows))


def pack_nibbles(nibbles: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """[..., 2n] of 0..15 -> [..., n] bytes: column 2i in the low half of byte i, column 2i + 1 in the high half."""
    packed: NDArray[np.uint8] = nibbles[..., 1::2] << np.uint8(4)
    packed |= nibbles[..., 0::2]
    return packed


def unpack_nibbles(packed: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """The inverse of `pack_nibbles`: [..., n] bytes -> [..., 2n] of 0..15."""
    nibbles = np.empty((*packed.shape[:-1], 2 * packed.shape[-1]), np.uint8)
    np.bitwise_and(packed, np.uint8(15), out=nibbles[..., 0::2])
    np.right_shift(packed, np.uint8(4), out=nibbles[..., 1::2])
    return nibbles
