"""Reading parts of a file by copy.

Conversion streams through checkpoints larger than memory.  A copy of a few rows costs only those rows, where a mapping
would stay in the process's memory, and a file cut short meanwhile gives an error instead of a crash.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt

from topg.errors import CheckpointError, ModelNotFoundError
from topg.wording import shown

Bytes = npt.NDArray[np.uint8]


def file_size(path: Path) -> int:
    """Size in bytes of a regular file.

    Raises ModelNotFoundError when there is nothing, CheckpointError when there is something else.
    """
    if path.exists() and not path.is_file():
        raise CheckpointError(f"{path} is a folder or a device, where a file of weights is expected")
    if not path.is_file():
        raise ModelNotFoundError(f"there is no file {path}")
    return path.stat().st_size


def read_block(path: Path, offset: int, nbytes: int) -> Bytes:
    """A copy of `nbytes` bytes from `offset`; raises CheckpointError when the file ends before.

    Callers have checked the range against the file's size.
    """
    block = np.fromfile(path, np.uint8, nbytes, offset=offset)
    if block.nbytes != nbytes:
        raise CheckpointError(f"{path}: the file became shorter while it was read")
    return block


def check_rows(name: str, start: int, stop: int, rows: int) -> None:
    """Raises IndexError unless 0 <= start <= stop <= rows: a slice must not be cut to size silently."""
    if not 0 <= start <= stop <= rows:
        raise IndexError(f"rows {start}:{stop} of {shown(name)} do not exist; it has {rows}")
