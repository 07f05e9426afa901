"""Weights from the checkpoint to the converted model's files, a block of rows at a time.

Memory stays at one block and what it becomes, whatever the size of the model.  Rows are converted each on its own, so
the blocks leave no trace in the result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from topg.converter.format import part_name
from topg.converter.safetensors_writer import SafetensorsWriter
from topg.converter.source import CheckpointSource
from topg.errors import CheckpointError, PrecisionError
from topg.models.base import Source, TensorSpec
from topg.precision.formats import Part, Precision
from topg.precision.gguf_blocks import keep
from topg.precision.quantise import quantise
from topg.precision.storage import Parts

MAX_FILE_BYTES = 4_000_000_000
BLOCK_BYTES = 8 << 20  # of float32 values

Progress = Callable[[int, int], None]


@dataclass(frozen=True, eq=False)
class TensorJob:
    """One tensor to convert: what it is, where it comes from, and how it will be stored.

    `kept_type` is the GGUF type whose blocks are taken over as they are, or None when values are stored anew.
    """

    spec: TensorSpec
    source: Source
    precision: Precision
    kept_type: str | None = None

    @property
    def parts(self) -> dict[str, Part]:
        """What it is stored as, by the names in the file."""
        stored = self.precision.parts(self.spec.shape)
        return {part_name(self.spec.name, name): part for name, part in stored.items()}

    @property
    def nbytes(self) -> int:
        """Bytes it takes in the converted model."""
        return self.precision.nbytes(self.spec.shape)


def write_weights(
    jobs: Sequence[TensorJob], checkpoint: CheckpointSource, folder: Path, progress: Progress,
    max_file_bytes: int = MAX_FILE_BYTES,
) -> dict[str, str]:  # fmt: skip
    """Convert every tensor in order into `folder`; returns the SHA-256 of each file written.

    `progress` is told the bytes stored so far and in all.  Raises CheckpointError for weights that are not finite,
    PrecisionError for weights that the precision cannot hold.
    """
    total, done = sum(job.nbytes for job in jobs), 0
    hashes: dict[str, str] = {}
    for number, group in enumerate(_files(jobs, max_file_bytes), start=1):
        path = folder / f"model-{number:05d}.safetensors"
        parts = {name: part for job in group for name, part in job.parts.items()}
        with SafetensorsWriter(path, parts, {"format": "topg"}) as writer:
            for name, rows in chain.from_iterable(_converted(job, checkpoint) for job in group):
                writer.write(name, rows)
                done += rows.nbytes
                progress(done, total)
        hashes[path.name] = writer.sha256
    return hashes


def same_values(checkpoint: CheckpointSource, left: str, right: str) -> bool:
    """Whether two stored tensors hold the same values, whatever their types."""
    shape = checkpoint.shape(left)
    if shape != checkpoint.shape(right):
        return False
    return all(
        np.array_equal(checkpoint.rows(left, start, stop), checkpoint.rows(right, start, stop))
        for start, stop in _row_blocks(shape)
    )


def _files(jobs: Sequence[TensorJob], max_file_bytes: int) -> Iterator[list[TensorJob]]:
    """Tensors in order, cut into files; a tensor larger than a file gets one of its own."""
    group: list[TensorJob] = []
    size = 0
    for job in jobs:
        if group and size + job.nbytes > max_file_bytes:
            yield group
            group, size = [], 0
        group.append(job)
        size += job.nbytes
    yield group


def _converted(job: TensorJob, checkpoint: CheckpointSource) -> Iterator[tuple[str, npt.NDArray[Any]]]:
    """The parts of a tensor, block after block."""
    convert = _kept_block if job.kept_type else _stored_block
    for start, stop in _row_blocks(job.spec.shape):
        for name, rows in convert(job, checkpoint, start, stop).items():
            yield part_name(job.spec.name, name), rows


def _row_blocks(shape: tuple[int, ...]) -> Iterator[tuple[int, int]]:
    """First and last row (exclusive) of each block; a vector's rows are its values."""
    row_bytes = 4 * int(np.prod(shape[1:], dtype=np.int64))
    step = max(1, BLOCK_BYTES // row_bytes)
    for start in range(0, shape[0], step):
        yield start, min(start + step, shape[0])


def _stored_block(job: TensorJob, checkpoint: CheckpointSource, start: int, stop: int) -> Parts:
    """Rows of the converted tensor, stored anew."""
    values = _select(checkpoint.rows, job.source, start, stop)
    if job.source.offset:
        values = values + np.float32(job.source.offset)
    _check_finite(values, job.source, start)
    try:
        return quantise(values, job.precision)
    except PrecisionError as error:
        raise PrecisionError(f"tensor {job.source.name}, rows from {start}: {error}") from error


def _kept_block(job: TensorJob, checkpoint: CheckpointSource, start: int, stop: int) -> Parts:
    """Rows of the converted tensor, with the codes and scales of the GGUF."""
    assert job.kept_type is not None
    raw = _select(checkpoint.raw_rows, job.source, start, stop)
    try:
        return keep(raw, job.kept_type, job.spec.shape[1])
    except CheckpointError as error:
        raise CheckpointError(f"tensor {job.source.name}, rows from {start}: {error}") from error


RowReader = Callable[[str, int, int], npt.NDArray[Any]]


def _select(read: RowReader, source: Source, start: int, stop: int) -> npt.NDArray[Any]:
    """Rows start..stop of the converted tensor, wherever the checkpoint keeps them."""
    if source.rows is None:
        return read(source.name, start, stop)
    wanted = source.rows[start:stop]
    first, last = int(wanted.min()), int(wanted.max())
    return read(source.name, first, last + 1)[wanted - first]


def _check_finite(values: npt.NDArray[Any], source: Source, start: int) -> None:
    finite = np.isfinite(values)
    if finite.all():
        return
    index = np.unravel_index(int(np.argmin(finite)), values.shape)
    row = start + int(index[0])
    stored = row if source.rows is None else int(source.rows[row])
    place = [stored, *(int(i) for i in index[1:])]
    raise CheckpointError(
        f"tensor {source.name} holds {values[index]} at position {place}; weights must be finite: the checkpoint is"
        " damaged, fetch or export it again"
    )
