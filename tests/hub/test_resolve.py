"""From a name to a checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest

from topg.errors import ModelNotFoundError
from topg.hub import resolve
from topg.hub.store import Pulled, Store
from topg.paths import Home


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    """A store with `smollm2-135m` and `hf:org/name`, and a working folder holding `here`."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here").mkdir()
    store = Store(Home(tmp_path / "home"))
    for name, file in (("smollm2-135m", "model.gguf"), ("hf--org--name", "config.json")):
        with store.filling(name) as folder:
            (folder / file).write_text("{}")
            store.add(Pulled(name, "a test", "CC0-1.0", {}), folder)
    return store


def test_a_pulled_gguf_is_its_file_and_a_pulled_repository_its_folder(store: Store) -> None:
    assert resolve("smollm2-135m", store) == store.home.models / "smollm2-135m" / "model.gguf"
    assert resolve("hf:org/name", store) == store.home.models / "hf--org--name"
    assert resolve("hf--org--name", store) == store.home.models / "hf--org--name"


def test_paths_are_paths(store: Store, tmp_path: Path) -> None:
    assert resolve("./here", store) == Path("here")
    assert resolve("here", store) == Path("here")
    assert resolve(str(tmp_path / "here"), store) == tmp_path / "here"


def test_a_pulled_name_comes_before_a_path_of_the_same_name(store: Store, tmp_path: Path) -> None:
    (tmp_path / "smollm2-135m").mkdir()
    assert resolve("smollm2-135m", store).name == "model.gguf"
    assert resolve("./smollm2-135m", store) == Path("smollm2-135m")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("gemma3-270m", "run `topg pull gemma3-270m`"),
        ("hf:org/other", "run `topg pull hf:org/other`"),
        ("hf:org/name@v2", "run `topg pull hf:org/name@v2`"),
        ("smol", "no model is named 'smol'; `topg pull` knows smollm2-135m, gemma3-270m and hf:ORG/NAME"),
        ("./missing", "there is nothing at ./missing"),
        ("hf:org", "write hf:ORG/NAME"),
    ],
)
def test_what_is_not_there(store: Store, name: str, said: str) -> None:
    with pytest.raises(ModelNotFoundError) as error:
        resolve(name, store)
    assert said in str(error.value)
    if "write" not in said:
        assert "pulled models: hf--org--name, smollm2-135m" in str(error.value)


def test_the_home_comes_from_the_environment(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOPG_HOME", str(store.home.root))
    assert resolve("smollm2-135m") == store.home.models / "smollm2-135m" / "model.gguf"


def test_an_empty_store(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match="pulled models: none"):
        resolve("smollm2-135m", Store(Home(tmp_path)))
