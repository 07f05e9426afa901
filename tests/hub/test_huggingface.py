"""Pulling from a hub: its own client against a small hub on this machine."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.web import Site, serving
from topg.errors import DownloadError, ModelNotFoundError, UnsupportedModelError
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
    "README.md": b"#",
}


class Quiet:
    """A report that nobody reads."""

    def note(self, text: str) -> None: ...

    def progress(self, what: str, done: int, total: int) -> None: ...


def publish(site: Site, repo: str, files: dict[str, bytes], revision: str = "main") -> None:
    """Make the server answer for `repo` as a hub does."""
    siblings = [{"rfilename": name, "size": len(content)} for name, content in files.items()]
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
    path = pull_huggingface(HubSpec.parse("hf:org/name"), store, Quiet(), site.url)

    assert path == store.home.models / "hf--org--name"
    taken = {"config.json", "model.safetensors", "chat_template.jinja"}
    assert {file.name for file in path.iterdir()} == taken | {"pulled.json"}
    record = json.loads((path / "pulled.json").read_text())
    assert record["source"] == f"hf:org/name@{COMMIT}"
    assert record["licence"] == "apache-2.0"
    assert record["files"] == {name: hashlib.sha256(FILES[name]).hexdigest() for name in taken}
    assert not [path for path, _, _ in site.asked if path.endswith((".bin", ".py"))]


def test_a_repository_that_is_there_is_not_asked_for_again(site: Site, store: Store) -> None:
    spec = HubSpec.parse("hf:org/name")
    pull_huggingface(spec, store, Quiet(), site.url)
    site.asked.clear()
    pull_huggingface(spec, store, Quiet(), site.url)
    assert site.asked == []


def test_a_revision_has_its_own_place(site: Site, store: Store) -> None:
    publish(site, "org/name", FILES, revision="v2")
    path = pull_huggingface(HubSpec.parse("hf:org/name@v2"), store, Quiet(), site.url)
    assert path.name == "hf--org--name--v2"


def test_a_repository_with_pickles_only(site: Site, store: Store) -> None:
    publish(site, "org/old", {"config.json": b"{}", "pytorch_model.bin": b"pickle"})
    with pytest.raises(UnsupportedModelError, match=r"holds no \.safetensors weights \(it has \.bin, \.json\)"):
        pull_huggingface(HubSpec.parse("hf:org/old"), store, Quiet(), site.url)
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
        pull_huggingface(HubSpec.parse("hf:org/other@v2"), store, Quiet(), site.url)


def test_a_file_shorter_than_the_hub_says(site: Site, store: Store) -> None:
    name = f"/org/name/resolve/{COMMIT}/model.safetensors"
    site.files[name] = site.files[name][:100]
    with pytest.raises(DownloadError, match="org/name"):
        pull_huggingface(HubSpec.parse("hf:org/name"), store, Quiet(), site.url)
    assert store.names() == ()


def test_a_hub_out_of_reach(store: Store) -> None:
    with serving(Site()) as gone:
        pass
    with pytest.raises(DownloadError, match="org/name cannot be fetched"):
        pull_huggingface(HubSpec.parse("hf:org/name"), store, Quiet(), gone.url)


@pytest.mark.parametrize("text", ["hf:", "hf:name", "hf:org/name@", "hf:org/na me", "hf:a/b/c", "hf:../..@x y"])
def test_what_is_no_repository(text: str) -> None:
    with pytest.raises(ModelNotFoundError, match="no repository of the hub"):
        HubSpec.parse(text)
