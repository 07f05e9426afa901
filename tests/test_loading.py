"""Opening models: a source is converted once, into the cache, and again only when it changed."""

from __future__ import annotations

import io
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from support.checkpoints import write_gguf, write_huggingface
from topg.converter.format import ConvertedModel
from topg.errors import CheckpointError, ModelNotFoundError, PrecisionError
from topg.loading import cache_folder, open_model
from topg.paths import Home


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return Home(tmp_path / "home")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_huggingface(tmp_path / "tiny")


def opened(path: Path, home: Home, quant: str | None = None) -> tuple[ConvertedModel, list[str]]:
    said: list[str] = []
    return open_model(path, quant, home, said.append), said


def test_a_source_is_converted_once(source: Path, home: Home) -> None:
    first, said = opened(source, home)
    assert first.manifest.recipe == "int8" and first.folder.parent == home.converted
    assert len(said) == 1 and str(source) in said[0] and str(first.folder) in said[0]
    second, said = opened(source, home)
    assert second.folder == first.folder and said == []


def test_recipes_have_their_own_copies(source: Path, home: Home) -> None:
    assert opened(source, home, "float32")[0].manifest.recipe == "float32"
    assert opened(source, home, "int4")[0].manifest.recipe == "int4"
    assert opened(source, home, "float32")[1] == []


def test_a_changed_source_is_converted_anew(source: Path, home: Home) -> None:
    before = opened(source, home)[0].folder
    weights = source / "model.safetensors"
    os.utime(weights, ns=(0, weights.stat().st_mtime_ns + 1))
    after, said = opened(source, home)
    assert after.folder != before and len(said) == 1


def test_a_damaged_copy_is_made_again(source: Path, home: Home) -> None:
    folder = opened(source, home)[0].folder
    (folder / "tokenizer.json").write_text("{}")
    model, said = opened(source, home)
    assert model.folder == folder and "damaged" in said[0]
    assert opened(source, home)[1] == []


def _flip_a_bit(folder: Path) -> None:
    path = folder / "model-00001.safetensors"
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(data)


def test_a_flipped_bit_in_the_copy_makes_it_again(source: Path, home: Home) -> None:
    folder = opened(source, home)[0].folder
    _flip_a_bit(folder)
    model, said = opened(source, home)
    assert model.folder == folder and "model-00001.safetensors is damaged" in said[0]
    model.verify()


def test_a_flipped_bit_in_a_converted_folder_is_refused(source: Path, home: Home) -> None:
    folder = Path(shutil.copytree(opened(source, home)[0].folder, home.root / "mine"))
    _flip_a_bit(folder)
    with pytest.raises(CheckpointError, match=r"mine/model-00001\.safetensors is damaged or was changed"):
        opened(folder, home)


@pytest.mark.parametrize("lost", ["manifest.json", "all", "folder"])
def test_a_copy_that_lost_its_files_is_made_again(source: Path, home: Home, lost: str) -> None:
    folder = opened(source, home)[0].folder
    (folder / "stray.txt").write_text("left by someone")
    for path in folder.iterdir():
        if lost in ("all", "folder", path.name):
            path.unlink()
    if lost == "folder":
        folder.rmdir()
        folder.write_text("a file in its place")
    model, said = opened(source, home)
    assert model.folder == folder and "damaged" in said[0]
    assert opened(source, home)[1] == []


def test_a_long_name_has_its_copy(tmp_path: Path, home: Home) -> None:
    model, _ = opened(write_huggingface(tmp_path / ("\N{GRINNING FACE}" * 60)), home)
    assert len(os.fsencode(model.folder.name)) < 240


@pytest.mark.parametrize("terminal", [True, False])
def test_a_terminal_sees_how_far_the_conversion_is(
    source: Path, home: Home, terminal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    screen = io.StringIO()
    monkeypatch.setattr(screen, "isatty", lambda: terminal)
    monkeypatch.setattr(sys, "stderr", screen)
    opened(source, home)
    assert ("converting: 100%" in screen.getvalue()) is terminal
    assert terminal or screen.getvalue() == ""


def test_a_gguf_file_is_a_source(tmp_path: Path, home: Home) -> None:
    model, _ = opened(write_gguf(tmp_path / "tiny.gguf"), home)
    assert model.folder.name.startswith("tiny-int8-")


def test_a_converted_folder_is_used_where_it_stands(source: Path, home: Home) -> None:
    folder = Path(shutil.copytree(opened(source, home)[0].folder, home.root / "mine"))
    model, said = opened(folder, home)
    assert model.folder == folder and said == []
    assert opened(folder, home, "int8")[0].folder == folder
    with pytest.raises(PrecisionError, match="converted to int8, not to float32"):
        opened(folder, home, "float32")


def test_unknown_names_and_recipes_are_refused(source: Path, home: Home, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for path in (tmp_path / "nothing", tmp_path / "empty"):
        with pytest.raises(ModelNotFoundError):
            opened(path, home)
    with pytest.raises(PrecisionError, match="int7"):
        opened(source, home, "int7")
    assert not cache_folder(source, "int8", home).exists()


@pytest.mark.slow
def test_two_processes_at_once_convert_once(source: Path, home: Home) -> None:
    code = (
        "import sys; from pathlib import Path; from topg.loading import open_model; from topg.paths import Home;"
        "open_model(sys.argv[1], None, Home(Path(sys.argv[2])), print)"
    )
    command = [sys.executable, "-c", code, str(source), str(home.root)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) for _ in range(3)]
    said = [process.communicate(timeout=60)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0, 0]
    assert sum("converting" in text for text in said) == 1
