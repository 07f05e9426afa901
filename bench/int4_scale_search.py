"""Relative RMS error of 4-bit weights in groups of 32: plain scales against searched ones.

    python bench/int4_scale_search.py                 random weights
    python bench/int4_scale_search.py model.gguf      and that file's matrices, by type

"absmax / 7" and "absmax / -8" are the plain symmetric scales (the second is ggml's Q4_0), "searched" is what ToPG
stores; then the same with a minimum, plain (ggml's Q4_1) and searched.  Judge by weights that never were 4-bit.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import gguf
import numpy as np

from topg.precision.gguf_blocks import keep, kept_precision
from topg.precision.quantise import dequantise
from topg.precision.scale_search import (
    SYMMETRIC_CODES,
    UNSIGNED_CODES,
    Lanes,
    Vector,
    asymmetric_int4_scales,
    nearest_codes,
    symmetric_int4_scales,
)
from topg.precision.storage import rounded, row_blocks

GROUP = 32
RANDOM_WEIGHTS = 1 << 20
WEIGHTS_PER_TYPE = 1 << 23
Scales = tuple[Vector, Vector | None]

METHODS: dict[str, Callable[[Lanes], Scales]] = {
    "absmax / 7": lambda lanes: (rounded(np.abs(lanes).max(axis=0) / np.float32(7), "float16"), None),
    "absmax / -8": lambda lanes: (symmetric_int4_scales(lanes, "float16", search=False), None),
    "searched": lambda lanes: (symmetric_int4_scales(lanes, "float16"), None),
    "min, plain": lambda lanes: asymmetric_int4_scales(lanes, "float16", search=False),
    "min, searched": lambda lanes: asymmetric_int4_scales(lanes, "float16"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("gguf", nargs="*", type=Path, help="GGUF files whose matrices are measured too")
    arguments = parser.parse_args()
    print(f"{'weights':24}" + "".join(f"{name:>15}" for name in METHODS) + f"{'million/s':>12}")
    for name, values in sources(arguments.gguf):
        print_row(name, values.reshape(-1, GROUP))


def sources(files: list[Path]) -> Iterator[tuple[str, np.ndarray]]:
    """Name and float32 weights of everything to measure."""
    rng = np.random.default_rng(0)
    yield "Gaussian", rng.standard_normal(RANDOM_WEIGHTS, np.float32)
    yield "Laplace", rng.laplace(size=RANDOM_WEIGHTS).astype(np.float32)
    yield "Student t, 4 degrees", rng.standard_t(4, RANDOM_WEIGHTS).astype(np.float32)
    for file in files:
        yield from matrices_by_type(file)


def matrices_by_type(file: Path) -> Iterator[tuple[str, np.ndarray]]:
    """The first weights of each type that the file's matrices have."""
    by_type: dict[str, list[np.ndarray]] = {}
    for tensor in gguf.GGUFReader(file).tensors:
        if len(tensor.shape) == 2:
            taken = by_type.setdefault(tensor.tensor_type.name, [])
            room = WEIGHTS_PER_TYPE - sum(values.size for values in taken)
            if rows := max(0, room) // int(tensor.shape[0]):
                taken.append(restored(tensor.data[:rows].view(np.uint8), tensor.tensor_type.name, int(tensor.shape[0])))
    for name, taken in by_type.items():
        yield f"{file.stem}, {name}", np.concatenate([values.ravel() for values in taken])


def restored(raw: np.ndarray, type_name: str, columns: int) -> np.ndarray:
    precision = kept_precision(type_name)
    if precision is None:
        raise SystemExit(f"tensor type {type_name} cannot be read")
    return dequantise(keep(raw, type_name, columns), precision, (len(raw), columns))


def print_row(name: str, groups: np.ndarray) -> None:
    """One line of the table; the speed is that of the symmetric search."""
    errors, seconds = {}, {}
    for method, scales in METHODS.items():
        start = time.perf_counter()
        errors[method] = relative_error(groups, scales)
        seconds[method] = time.perf_counter() - start
    speed = groups.size / seconds["searched"] / 1e6
    print(f"{name:24}" + "".join(f"{errors[method]:15.4f}" for method in METHODS) + f"{speed:12.0f}")


def relative_error(groups: np.ndarray, scales_of: Callable[[Lanes], Scales]) -> float:
    error = total = 0.0
    for block in row_blocks(len(groups), GROUP):
        lanes = np.ascontiguousarray(groups[block].T)
        scales, minimums = scales_of(lanes)
        limits = SYMMETRIC_CODES if minimums is None else UNSIGNED_CODES
        values = nearest_codes(lanes, scales, minimums, limits) * scales
        if minimums is not None:
            values += minimums
        error += float(np.square(values - lanes).sum())
        total += float(np.square(lanes).sum())
    return float(np.sqrt(error / total))


if __name__ == "__main__":
    main()
