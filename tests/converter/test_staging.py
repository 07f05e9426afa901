from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from topg.converter.staging import staged_folder
from topg.errors import CapacityError, ConfigError


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


def test_leftovers_of_a_killed_run_are_removed_and_others_kept(tmp_path: Path) -> None:
    for name in (".model.partial", ".model.replaced", ".model.lock", ".other.partial"):
        (tmp_path / name).mkdir() if name != ".model.lock" else (tmp_path / name).touch()
    (tmp_path / "model").mkdir()
    with staged_folder(tmp_path / "model", replace=True):
        pass
    assert sorted(entry.name for entry in tmp_path.iterdir()) == [".other.partial", "model"]


def test_a_model_moved_aside_by_a_killed_run_comes_back(tmp_path: Path) -> None:
    aside = tmp_path / ".model.replaced"
    aside.mkdir()
    (aside / "file").write_text("old")
    with pytest.raises(ConfigError, match="exists already"), staged_folder(tmp_path / "model"):
        pass
    assert (tmp_path / "model" / "file").read_text() == "old"


def test_a_second_writer_is_refused_and_harms_nothing(tmp_path: Path) -> None:
    """In the same process, where a process id tells the two apart no more."""
    with staged_folder(tmp_path / "model") as folder:
        (folder / "file").write_text("first")
        with pytest.raises(ConfigError, match="is being written by someone else"), staged_folder(tmp_path / "model"):
            pass
    assert (tmp_path / "model" / "file").read_text() == "first"
    assert [entry.name for entry in tmp_path.iterdir()] == ["model"]


def test_many_writers_at_once_write_one_whole_model(tmp_path: Path) -> None:
    def write(number: int) -> bool:
        try:
            with staged_folder(tmp_path / "model", replace=True) as folder:
                for name in ("a", "b"):
                    (folder / name).write_text(str(number))
        except ConfigError:
            return False
        return True

    with ThreadPoolExecutor(8) as executor:
        assert any(executor.map(write, range(100)))
    assert (tmp_path / "model" / "a").read_text() == (tmp_path / "model" / "b").read_text()
    assert [entry.name for entry in tmp_path.iterdir()] == ["model"]


def test_a_full_disk_is_a_capacity_error(tmp_path: Path) -> None:
    with (
        pytest.raises(CapacityError, match="no room left"),
        staged_folder(tmp_path / "model"),
        Path("/dev/full").open("wb", buffering=0) as full,
    ):
        full.write(b"x")
    assert list(tmp_path.iterdir()) == []
