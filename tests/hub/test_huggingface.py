"""Pulling from a hub: its own client against a small hub on this machine."""

from __future__ import annotations

import hashlib
import json
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.reports import Notes, SilentReport
from support.web import Site, serving
from topg.errors import CapacityError, DownloadError, ModelNotFoundError, UnsupportedModelError
from topg.hub.huggingface import HubSpec, pull_huggingface
from topg.hub.store import Store
from topg.paths import Home

COMMIT = "0123456789abcdef0123456789abcdef01234567"
FILES = {
    "config.json": b"{}",
    "model.safetensors": b"weights" * 1000,
    "chat_template.jinja": b"{{ messages }}",
    "pytorch_model.bin": b"pickle",
    "modeling_custom.py": b"raise SystemExit",
    "original/params.json": b"{}",
    "consolidated.safetensors": b"the weights again, in another layout",
    "README.md": b"#",
}

TAKEN = {"config.json", "model.safetensors", "chat_template.jinja"}


def sibling(name: str, content: bytes) -> dict[str, object]:
    """What a hub tells of a file: weights stand outside of git, which holds a pointer to them."""
    told: dict[str, object] = {"rfilename": name, "size": len(content)}
    if name.endswith((".safetensors", ".bin")):
        lfs = {"sha256": hashlib.sha256(content).hexdigest(), "size": len(content), "pointerSize": 134}
        return told | {"blobId": "0" * 40, "lfs": lfs}
    return told | {"blobId": hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()}


def publish(site: Site, repo: str, files: dict[str, bytes], revision: str = "main") -> None:
    """Make the server answer for `repo` as a hub does."""
    siblings = [sibling(name, content) for name, content in files.items()]
    info = {"id": repo, "sha": COMMIT, "siblings": siblings, "cardData": {"license": "apache-2.0"}, "tags": []}
    tree = [{"type": "file", "path": name, "size": len(content), "oid": "0" * 40} for name, content in files.items()]
    for place in ("", f"/revision/{revision}", f"/revision/{COMMIT}"):
        path = f"/api/models/{repo}{place}"
        site.files[path] = json.dumps(info).encode()
        site.types[path] = "application/json"
    site.files[f"/api/models/{repo}/tree/{COMMIT}"] = json.dumps(tree).encode()
    site.types[f"/api/models/{repo}/tree/{COMMIT}"] = "application/json"
    for name, content in files.items():
        path = f"/{repo}/resolve/{COMMIT}/{name}"
        site.files[path] = content
        site.headers[path] = {"ETag": f'"{hashlib.sha256(content).hexdigest()}"', "X-Repo-Commit": COMMIT}


@pytest.fixture
def site(monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    with serving(Site()) as site:
        publish(site, "org/name", FILES)
        yield site


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(Home(tmp_path))


def test_only_tensors_settings_and_templates_are_taken(site: Site, store: Store) -> None:
    path = pull_huggingface(HubSpec.parse("hf:org/name"), store, SilentReport(), site.url)

    assert path == store.home.models / "hf--org--name"
    assert {file.name for file in path.iterdir()} == TAKEN | {"pulled.json"}
    record = json.loads((path / "pulled.json").read_text())
    assert record["source"] == f"hf:org/name@{COMMIT}"
    assert record["licence"] == "apache-2.0"
    assert record["files"] == {name: hashlib.sha256(FILES[name]).hexdigest() for name in TAKEN}
    assert not [path for path, _, _ in site.asked if path.endswith((".bin", ".py", "consolidated.safetensors"))]


def test_the_transfer_is_told_in_bytes(site: Site, store: Store) -> None:
    class Holding(Notes):
        """Has the server stop halfway through each file until progress was told."""

        def note(self, text: str) -> None:
            site.gate = threading.Event()

        def progress(self, what: str, done: int, total: int) -> None:
            super().progress(what, done, total)
            assert site.gate is not None
            site.gate.set()

    report = Holding()
    pull_huggingface(HubSpec.parse("hf:org/name"), store, report, site.url)
    total = sum(len(FILES[name]) for name in TAKEN)
    assert report.steps[-1] == ("org/name", total, total)
    assert report.finished == ["org/name"]
    assert len(report.steps) > 1
    assert report.steps == sorted(report.steps)


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_a_file_that_is_not_the_one_the_hub_told_of(site: Site, store: Store, name: str) -> None:
    path = f"/org/name/resolve/{COMMIT}/{name}"
    right = site.files[path]
    site.files[path] = bytes(len(right))
    with pytest.raises(DownloadError, match=f"{name} of org/name is not what the hub said"):
        pull_huggingface(HubSpec.parse("hf:org/name"), store, SilentReport(), site.url)
    assert store.names() == ()

    site.files[path] = right
    pulled = pull_huggingface(HubSpec.parse("hf:org/name"), store, SilentReport(), site.url)
    assert (pulled / name).read_bytes() == right


def test_what_is_there_needs_no_room_again(
    site: Site, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    config = f"/org/name/resolve/{COMMIT}/config.json"
    site.refusals[config] = 403
    with pytest.raises((DownloadError, ModelNotFoundError)):
        pull_huggingface(HubSpec.parse("hf:org/name"), store, SilentReport(), site.url)
    weights = store.home.downloads / "hf--org--name.new" / "model.safetensors"
    assert weights.read_bytes() == FILES["model.safetensors"]

    del site.refusals[config]
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: shutil._ntuple_diskusage(10**4, 10**4 - 2000, 2000))
    pull_huggingface(HubSpec.parse("hf:org/name"), store, SilentReport(), site.url)


def test_a_repository_that_does_not_fit_is_refused_before_the_transfer(
    site: Site, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: shutil._ntuple_diskusage(10**4, 10**4 - 2000, 2000))
    with pytest.raises(CapacityError, match="make room"):
        pull_huggingface(HubSpec.parse("hf:org/name"), store, SilentReport(), site.url)
    assert not [path for path, _, _ in site.asked if "/resolve/" in path]


def test_a_repository_that_is_there_is_not_asked_for_again(site: Site, store: Store) -> None:
    spec = HubSpec.parse("hf:org/name")
    pull_huggingface(spec, store, SilentReport(), site.url)
    site.asked.clear()
    pull_huggingface(spec, store, SilentReport(), site.url)
    assert site.asked == []


def test_a_revision_has_its_own_place(site: Site, store: Store) -> None:
    publish(site, "org/name", FILES, revision="v2")
    path = pull_huggingface(HubSpec.parse("hf:org/name@v2"), store, SilentReport(), site.url)
    assert path.name == "hf--org--name--v2"


def test_a_repository_with_pickles_only(site: Site, store: Store) -> None:
    publish(site, "org/old", {"config.json": b"{}", "pytorch_model.bin": b"pickle"})
    with pytest.raises(UnsupportedModelError, match=r"holds no \.safetensors weights .*\(it has \.bin, \.json\)"):
        pull_huggingface(HubSpec.parse("hf:org/old"), store, SilentReport(), site.url)
    assert store.names() == ()


@pytest.mark.parametrize(
    ("status", "code", "said"),
    [
        (404, "RepoNotFound", "the hub has no repository 'org/other'"),
        (404, "RevisionNotFound", "org/other has no revision 'v2'"),
        (403, "GatedRepo", "org/other is gated"),
    ],
)
def test_a_repository_that_the_hub_does_not_give(site: Site, store: Store, status: int, code: str, said: str) -> None:
    path = "/api/models/org/other/revision/v2"
    site.refusals[path] = status
    site.headers[path] = {"X-Error-Code": code, "X-Error-Message": "no"}
    with pytest.raises(ModelNotFoundError, match=said):
        pull_huggingface(HubSpec.parse("hf:org/other@v2"), store, SilentReport(), site.url)


def test_a_file_shorter_than_the_hub_says(site: Site, store: Store) -> None:
    name = f"/org/name/resolve/{COMMIT}/model.safetensors"
    site.files[name] = site.files[name][:100]
    with pytest.raises(DownloadError, match="org/name"):
        pull_huggingface(HubSpec.parse("hf:org/name"), store, SilentReport(), site.url)
    assert store.names() == ()


def test_a_hub_out_of_reach(store: Store) -> None:
    with serving(Site()) as gone:
        pass
    with pytest.raises(DownloadError, match="org/name cannot be fetched"):
        pull_huggingface(HubSpec.parse("hf:org/name"), store, SilentReport(), gone.url)


@pytest.mark.parametrize("text", ["hf:", "hf:name", "hf:org/name@", "hf:org/na me", "hf:a/b/c", "hf:../..@x y"])
def test_what_is_no_repository(text: str) -> None:
    with pytest.raises(ModelNotFoundError, match="no repository of the hub"):
        HubSpec.parse(text)
