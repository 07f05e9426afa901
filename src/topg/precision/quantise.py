"""float32 weights to what is stored, and back.

Every row is quantised on its own, so a converter may hand rows over in blocks of any size and gets the same bits.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from topg.errors import PrecisionError
from topg.precision.formats import Precision, ScaleFormat
from topg.precision.rotation import ROTATION_GROUP, hadamard, rotate_lanes
from topg.precision.scale_search import (
    SYMMETRIC_CODES,
    UNSIGNED_CODES,
    Lanes,
    Vector,
    asymmetric_int4_scales,
    nearest_codes,
    symmetric_int4_scales,
)
from topg.precision.storage import (
    Parts,
    allocate,
    check_parts,
    decode,
    encode,
    pack_nibbles,
    plain_storage,
    rounded,
    row_blocks,
    unpack_nibbles,
)

__all__ = ["dequantise", "hadamard", "quantise", "quantise_rows"]

INT8_CODES = (-127, 127)


def quantise(values: NDArray[np.float32], precision: Precision) -> Parts:
    """Store a whole tensor: float32 [rows, columns] (plain formats: any shape) -> the arrays of `Precision.parts`.

    Codes are the nearest ones to the scale as stored.  Raises PrecisionError on values that are not finite, that the
    format cannot hold, or on a precision that cannot be met.
    """
    check_quantisable(precision, values.shape)
    parts = allocate(precision, values.shape)
    quantise_rows(values, precision, parts)
    return parts


def quantise_rows(
    values: NDArray[np.float32],
    precision: Precision,
    out: Mapping[str, NDArray[Any]],
    *,
    first_row: int = 0,
    search: bool = True,
) -> None:
    """Store a block of rows into `out`, the same rows of each of the tensor's parts.

    The result does not depend on how a tensor is cut into blocks.  `first_row` is the block's place in the tensor, for
    messages.  `search=False` takes the plain int4 scales, so that the gain of the search can be measured.  Raises as
    `quantise` does; `out` is then partly written.
    """
    check_quantisable(precision, values.shape)
    check_parts(out, precision, values.shape)
    if values.dtype != np.float32:
        raise PrecisionError(f"weights of type {values.dtype} were given; convert them to float32 first")
    if not precision.grouped:
        _store_plain(values, precision, out["values"], first_row)
        return
    rows, columns = values.shape
    for block in row_blocks(rows, columns):
        target = {name: part[block] for name, part in out.items()}
        _store_grouped(values[block], precision, target, first_row + block.start, search)


def dequantise(parts: Mapping[str, NDArray[Any]], precision: Precision, shape: tuple[int, ...]) -> NDArray[np.float32]:
    """The float32 tensor of `shape` that `parts` stand for, rotated back and without padding.

    Raises PrecisionError when the parts are not those of such a tensor.
    """
    check_quantisable(precision, shape)
    check_parts(parts, precision, shape)
    if not precision.grouped:
        return decode(parts["values"], plain_storage(precision))
    rows, columns = shape
    values = np.empty((rows, columns), np.float32)
    for block in row_blocks(rows, columns):
        values[block] = _grouped_values({name: part[block] for name, part in parts.items()}, precision)[:, :columns]
    return values


def check_quantisable(precision: Precision, shape: tuple[int, ...]) -> None:
    """Raise PrecisionError when a tensor of `shape` cannot be stored in `precision`."""
    size = precision.group_size
    if size is None:
        if precision.weights in ("int8", "int4"):
            raise PrecisionError(f"{precision.weights} weights need a group_size and a scale format")
        return
    if precision.weights not in ("int8", "int4") or precision.scale is None:
        raise PrecisionError(f"groups need int8 or int4 weights and a scale format; given: {precision}")
    if size < 2 or size & (size - 1):
        raise PrecisionError(f"group_size is {size}; it must be a power of two, at least 2")
    if precision.rotated and size % ROTATION_GROUP:
        raise PrecisionError(f"group_size of rotated weights is {size}; it must be a multiple of {ROTATION_GROUP}")
    if len(shape) != 2:
        raise PrecisionError(f"{precision.describe()} stores matrices; a tensor of shape {list(shape)} was given")


def _store_plain(values: NDArray[np.float32], precision: Precision, out: NDArray[Any], first_row: int) -> None:
    rows = np.atleast_2d(values)  # a vector is checked as one row
    targets, storage = np.atleast_2d(out), plain_storage(precision)
    for block in row_blocks(len(rows), int(np.prod(rows.shape[1:]))):
        _check_finite(rows[block], first_row + block.start)
        targets[block] = encode(rows[block], storage)
        _check_range(rows[block], decode(targets[block], storage), precision, first_row + block.start)


def _store_grouped(values: NDArray[np.float32], precision: Precision, out: Parts, first_row: int, search: bool) -> None:
    assert precision.scale is not None
    _check_finite(values, first_row)
    with np.errstate(over="ignore", invalid="ignore"):  # what overflows is found in the scales
        lanes = _lanes(values, precision)
        scales, minimums, limits = _scales(lanes, precision, search)
    groups = out["scales"].shape
    _check_scales(scales, minimums, precision, groups, first_row)
    out["scales"][...] = encode(scales, precision.scale).reshape(groups)
    if minimums is not None:
        out["minimums"][...] = encode(minimums, precision.scale).reshape(groups)
    codes = nearest_codes(lanes, scales, minimums, limits)
    out["codes"][...] = _packed(codes, precision).T.reshape(out["codes"].shape)


def _lanes(values: NDArray[np.float32], precision: Precision) -> Lanes:
    """Groups as columns [group size, rows * groups], filled up with zeros and rotated where the precision says so."""
    assert precision.group_size is not None
    padding = -values.shape[1] % precision.group_size
    if padding:
        values = np.pad(values, ((0, 0), (0, padding)))
    if not precision.rotated:
        return np.ascontiguousarray(values.reshape(-1, precision.group_size).T)
    rotated = rotate_lanes(values.reshape(-1, ROTATION_GROUP).T.copy())  # a copy even of one group: it is overwritten
    if precision.group_size == ROTATION_GROUP:
        return rotated
    return np.ascontiguousarray(rotated.T.reshape(-1, precision.group_size).T)


def _scales(lanes: Lanes, precision: Precision, search: bool) -> tuple[Vector, Vector | None, tuple[int, int]]:
    """Scales and minimums [groups] as stored, and the range of the codes."""
    assert precision.scale is not None
    if precision.weights == "int4":
        if precision.minimum:
            return *asymmetric_int4_scales(lanes, precision.scale, search=search), UNSIGNED_CODES
        return symmetric_int4_scales(lanes, precision.scale, search=search), None, SYMMETRIC_CODES
    if precision.minimum:
        return *_middle_scales(lanes, precision.scale), INT8_CODES
    largest = np.maximum(lanes.max(axis=0), -lanes.min(axis=0))
    return rounded(largest / np.float32(127), precision.scale), None, INT8_CODES


def _middle_scales(lanes: Lanes, scale_format: ScaleFormat) -> tuple[Vector, Vector]:
    """int8 codes are symmetric about zero, so code 0, and with it the stored offset, is the middle of the range."""
    low, high = lanes.min(axis=0), lanes.max(axis=0)
    middle = rounded((low + high) / np.float32(2), scale_format)
    reach = np.maximum(high - middle, middle - low)  # from the middle as stored
    return rounded(reach / np.float32(127), scale_format), middle


def _packed(codes: Lanes, precision: Precision) -> NDArray[Any]:
    """Codes as stored, still as lanes: [group size, groups] int8, or [group size / 2, groups] bytes of two nibbles."""
    if precision.weights == "int8":
        return codes.astype(np.int8)
    if not precision.minimum:
        codes = codes + np.float32(8)
    return pack_nibbles(codes.astype(np.uint8).T).T


def _grouped_values(parts: Parts, precision: Precision) -> NDArray[np.float32]:
    """float32 [rows, padded columns] of a block of rows."""
    assert precision.scale is not None
    rows, groups = parts["scales"].shape
    values = _code_values(parts["codes"], precision).reshape(rows, groups, -1)
    values *= decode(parts["scales"], precision.scale)[..., None]
    if precision.minimum:
        values += decode(parts["minimums"], precision.scale)[..., None]
    flat = values.reshape(rows, -1)
    return hadamard(flat) if precision.rotated else flat


def _code_values(codes: NDArray[Any], precision: Precision) -> NDArray[np.float32]:
    if precision.weights == "int8":
        return codes.astype(np.float32)
    values = unpack_nibbles(codes).astype(np.float32)
    if not precision.minimum:
        values -= np.float32(8)
    return values


def _check_finite(values: NDArray[np.float32], first_row: int) -> None:
    finite = np.isfinite(values)
    if not finite.all():
        place = _first(~finite, first_row)
        raise PrecisionError(
            f"the weight at {place} is {values[~finite][0]}; only finite numbers can be stored: "
            "the checkpoint is damaged, get it again"
        )


def _check_range(
    values: NDArray[np.float32], stored: NDArray[np.float32], precision: Precision, first_row: int
) -> None:
    fits = np.isfinite(stored)
    if not fits.all():
        wider = "bfloat16" if precision.weights == "float16" else "float32"
        raise PrecisionError(
            f"the weight {values[~fits][0]:g} at {_first(~fits, first_row)} is too large for {precision.weights}; "
            f"store this tensor as {wider}"
        )


def _check_scales(
    scales: Vector, minimums: Vector | None, precision: Precision, groups: tuple[int, ...], first_row: int
) -> None:
    fits = np.isfinite(scales) if minimums is None else np.isfinite(scales) & np.isfinite(minimums)
    if not fits.all():
        row, group = np.argwhere(~fits.reshape(groups))[0]
        raise PrecisionError(
            f"the weights of group {group} in row {first_row + row} are too large for the {precision.scale} scales of "
            f"{precision.describe()}; store this tensor as bfloat16"
        )


def _first(wrong: NDArray[np.bool_], first_row: int) -> str:
    index = [int(i) for i in np.argwhere(wrong)[0]]
    return str([index[0] + first_row, *index[1:]])
