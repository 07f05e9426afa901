"""Hashes, room on the disk, durable writes, and which files make a checkpoint."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest

from topg.errors import CapacityError
from topg.files import CHUNK_BYTES, belongs_to_checkpoint, is_gguf, require_space, sha256_of, sync_folder


@pytest.mark.parametrize("size", [0, 1, CHUNK_BYTES, CHUNK_BYTES + 1])
def test_a_hash_covers_the_whole_file(tmp_path: Path, size: int) -> None:
    content = os.urandom(size)
    (tmp_path / "file").write_bytes(content)
    assert sha256_of(tmp_path / "file") == hashlib.sha256(content).hexdigest()


def test_free_space_is_asked_of_the_nearest_folder(tmp_path: Path) -> None:
    require_space(tmp_path / "not" / "yet", 1, "make room")
    with pytest.raises(CapacityError, match=r"yet needs 1000 TB, its disk has .* free; make room"):
        require_space(tmp_path / "not" / "yet", 10**15, "make room")


@pytest.mark.parametrize(
    ("name", "belongs"),
    [
        ("config.json", True), ("model-00001-of-00002.safetensors", True), ("chat_template.jinja", True),
        ("consolidated.safetensors", False), ("consolidated.00.safetensors", False), ("consolidated.json", True),
        ("modeling.py", False), ("pytorch_model.bin", False), ("tokenizer.model", False),
    ],
)  # fmt: skip
def test_files_of_a_checkpoint(name: str, belongs: bool) -> None:
    assert belongs_to_checkpoint(name) is belongs


@pytest.mark.parametrize(("name", "known"), [("a.gguf", True), ("a.GGUF", True), ("a.gguf.part", False)])
def test_a_gguf_is_known_by_its_suffix_in_any_case(name: str, known: bool) -> None:
    assert is_gguf(Path(name)) is known


def test_a_folder_is_synced_after_its_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[int] = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: synced.append(os.fstat(descriptor).st_ino))
    for name in ("a", "b"):
        (tmp_path / name).write_text(name)

    sync_folder(tmp_path)

    assert set(synced[:-1]) == {(tmp_path / name).stat().st_ino for name in ("a", "b")}
    assert synced[-1] == tmp_path.stat().st_ino
