"""Where a converted model may be written: every other place is refused in one plain sentence."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from topg.converter.target import MAX_NAME_BYTES, check_target
from topg.errors import ConfigError


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A folder with everything in it that is no converted model."""
    (tmp_path / "file").write_text("x")
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "folder")
    (tmp_path / "dangling").symlink_to(tmp_path / "nothing")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "manifest.json").write_text("{}")
    (tmp_path / "mixed").mkdir()
    (tmp_path / "mixed" / "manifest.json").write_text("{}")
    (tmp_path / "mixed" / "notes.txt").write_text("mine")
    return tmp_path


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("a\0b", "holds a NUL character"),
        ("x" * (MAX_NAME_BYTES + 1), "is too long; a name may have 245 bytes"),
        ("a/" * 3000 + "b", "is too long"),
        ("\ud83d", "cannot be written as the name of a file"),
        ("file/model", "file is not a folder; give another place"),
        ("file/deep/model", "file is not a folder; give another place"),
        ("dangling/model", "dangling is not a folder; give another place"),
    ],
)
@pytest.mark.parametrize("overwrite", [False, True])
def test_what_cannot_be_a_folder_is_refused(place: Path, name: str, overwrite: bool, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        check_target(place / name, overwrite)
    assert "Errno" not in str(caught.value) and os.strerror(errno.ENOTDIR) not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("link", "is a symbolic link and is not overwritten"),
        ("dangling", "is a symbolic link and is not overwritten"),
        ("file", "is a file, not a converted model, and is not overwritten"),
        ("folder", "has no manifest.json: it is not a converted model and is not overwritten"),
        ("mixed", "also holds 'notes.txt', which is no part of a converted model"),
    ],
)
def test_only_a_converted_model_is_overwritten(place: Path, name: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        check_target(place / name, overwrite=True)
    check_target(place / "model", overwrite=True)


def test_the_longest_name_can_be_written(place: Path) -> None:
    target = place / ("x" * MAX_NAME_BYTES)
    check_target(target, overwrite=False)
    target.with_name(f".{target.name}.replaced").mkdir()
