from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from topg.converter.staging import require_free_space, staged_folder
from topg.errors import CapacityError, ConfigError


def _dead_process() -> int:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def test_the_folder_appears_when_the_block_ends(tmp_path: Path) -> None:
    target = tmp_path / "a" / "model"
    with staged_folder(target) as folder:
        (folder / "file").write_text("new")
        assert not target.exists()
    assert (target / "file").read_text() == "new"
    assert [entry.name for entry in target.parent.iterdir()] == ["model"]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, OSError])
def test_nothing_is_left_when_the_block_fails(tmp_path: Path, error: type[BaseException]) -> None:
    with pytest.raises(error), staged_folder(tmp_path / "model") as folder:
        (folder / "file").write_text("new")
        raise error
    assert list(tmp_path.iterdir()) == []


def test_what_stands_there_is_kept(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    with pytest.raises(ConfigError, match="exists already"), staged_folder(tmp_path / "model"):
        pass
    assert [entry.name for entry in tmp_path.iterdir()] == ["model"]


@pytest.mark.parametrize("fails", [True, False])
def test_replacing_keeps_the_old_until_the_new_is_complete(tmp_path: Path, fails: bool) -> None:
    target = tmp_path / "model"
    target.mkdir()
    (target / "file").write_text("old")
    try:
        with staged_folder(target, replace=True) as folder:
            (folder / "file").write_text("new")
            assert (target / "file").read_text() == "old"
            if fails:
                raise ValueError
    except ValueError:
        pass
    assert (target / "file").read_text() == ("old" if fails else "new")
    assert [entry.name for entry in tmp_path.iterdir()] == ["model"]


def test_the_slower_of_two_writers_replaces_nothing(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="exists already"), staged_folder(tmp_path / "model"):
        (tmp_path / "model").mkdir()
        (tmp_path / "model" / "file").write_text("first")
    assert (tmp_path / "model" / "file").read_text() == "first"
    assert [entry.name for entry in tmp_path.iterdir()] == ["model"]


def test_leftovers_of_dead_processes_are_removed_and_others_kept(tmp_path: Path) -> None:
    dead, alive = _dead_process(), os.getppid()
    names = [f".model.partial-{dead}", f".model.partial-{alive}", f".model.partial-{os.getpid()}",
             f".other.partial-{dead}", ".model.partial-notes", f".model.replaced-{dead}"]  # fmt: skip
    for name in names:
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text(name)
    (tmp_path / "model").mkdir()
    with staged_folder(tmp_path / "model", replace=True):
        pass
    left = sorted(entry.name for entry in tmp_path.iterdir())
    assert left == sorted(["model", f".model.partial-{alive}", f".other.partial-{dead}", ".model.partial-notes"])


def test_a_model_moved_aside_by_a_killed_run_comes_back(tmp_path: Path) -> None:
    aside = tmp_path / f".model.replaced-{_dead_process()}"
    aside.mkdir()
    (aside / "file").write_text("old")
    with pytest.raises(ConfigError, match="exists already"), staged_folder(tmp_path / "model"):
        pass
    assert (tmp_path / "model" / "file").read_text() == "old"


def test_names_with_pattern_characters_mean_themselves(tmp_path: Path) -> None:
    other = tmp_path / f".model1.partial-{_dead_process()}"
    other.mkdir()
    with staged_folder(tmp_path / "model[1]"):
        pass
    assert other.is_dir()
    assert (tmp_path / "model[1]").is_dir()


def test_a_full_disk_is_a_capacity_error(tmp_path: Path) -> None:
    with (
        pytest.raises(CapacityError, match="no room left"),
        staged_folder(tmp_path / "model"),
        Path("/dev/full").open("wb", buffering=0) as full,
    ):
        full.write(b"x")
    assert list(tmp_path.iterdir()) == []


def test_free_space_is_asked_of_the_nearest_folder(tmp_path: Path) -> None:
    require_free_space(tmp_path / "not" / "yet", 1)
    with pytest.raises(CapacityError, match=r"needs 1000000000\.00 GB, its disk has"):
        require_free_space(tmp_path / "not" / "yet", 10**18)
