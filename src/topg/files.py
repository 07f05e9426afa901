"""What every part that keeps files needs: their hashes, room on the disk, and writes that survive a power failure."""

from __future__ import annotations

import hashlib
import os
import shutil
from pathlib import Path

from topg.errors import CapacityError
from topg.units import format_size

GGUF_SUFFIX = ".gguf"
FOLDER_SUFFIXES = (".safetensors", ".json", ".jinja")
"""What is taken of a Hugging Face folder: tensors, settings and chat templates; never code or pickles."""

CHUNK_BYTES = 1 << 20


def is_gguf(path: Path) -> bool:
    """Whether a file's name says that it is a GGUF."""
    return path.suffix.lower() == GGUF_SUFFIX


def belongs_to_checkpoint(name: str) -> bool:
    """Whether a file of a Hugging Face folder is part of the checkpoint.

    `consolidated*.safetensors` is not: it is a second copy of the weights, in a layout of its publisher's own.
    """
    copy = name.startswith("consolidated") and name.endswith(".safetensors")
    return name.endswith(FOLDER_SUFFIXES) and not copy


def sha256_of(path: Path) -> str:
    """SHA-256 of a file's contents, in hexadecimal."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def require_space(folder: Path, nbytes: int, advice: str) -> None:
    """Raises CapacityError, with `advice`, when the disk of `folder` has no room for `nbytes` more bytes.

    The folder need not exist yet; the disk is that of the nearest one above it that does.
    """
    existing = next(parent for parent in (folder, *folder.resolve().parents) if parent.is_dir())
    free = shutil.disk_usage(existing).free
    if nbytes > free:
        raise CapacityError(f"{folder} needs {format_size(nbytes)}, its disk has {format_size(free)} free; {advice}")


def sync_folder(folder: Path) -> None:
    """Make the files of a folder, and their names, survive a power failure."""
    for path in (*folder.iterdir(), folder):
        sync(path)


def sync(path: Path) -> None:
    """Make the contents of a file, or the names in a folder, survive a power failure."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
