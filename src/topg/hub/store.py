"""The store of pulled models: one folder a model, which appears whole or not at all.

<home>/models/smollm2-135m/            model.gguf, pulled.json
<home>/models/hf--ORG--NAME/           config.json, *.safetensors, ..., pulled.json
<home>/downloads/smollm2-135m.lock     held while the model is pulled
<home>/downloads/smollm2-135m.new/     the folder while it is filled
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from topg.errors import ModelError, ModelNotFoundError
from topg.files import sync, sync_folder
from topg.hub.lock import file_lock
from topg.paths import Home

RECORD = "pulled.json"
SPACE_ADVICE = "make room, or set TOPG_HOME to a folder on another disk"
GGUF_FILE = "model.gguf"

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")


@dataclass(frozen=True)
class Pulled:
    """What `pulled.json` says: where a model came from, and what its files are (SHA-256 by file name)."""

    name: str
    source: str
    licence: str
    files: Mapping[str, str]


class Store:
    """The models of one home."""

    def __init__(self, home: Home) -> None:
        self.home = home

    def names(self) -> tuple[str, ...]:
        """Names of all pulled models, sorted."""
        return tuple(sorted(record.parent.name for record in self.home.models.glob(f"*/{RECORD}")))

    def has(self, name: str) -> bool:
        return (self.folder(name) / RECORD).is_file()

    def folder(self, name: str) -> Path:
        """Where a model stands once it is pulled; raises ModelNotFoundError for what is no name."""
        if not _NAME.fullmatch(name):
            raise ModelNotFoundError(
                f"{name!r} is not a model name; a name is made of letters, digits, '.', '_' and '-', 200 at most"
            )
        return self.home.models / name

    def model_path(self, name: str) -> Path:
        """The checkpoint of a pulled model: its GGUF file, or else its folder."""
        gguf = self.folder(name) / GGUF_FILE
        return gguf if gguf.is_file() else self.folder(name)

    @contextmanager
    def locked(self, name: str, on_wait: Callable[[], None]) -> Iterator[None]:
        """Keeps other pulls of the same model out within the block."""
        with file_lock(self.home.downloads / f"{self.folder(name).name}.lock", on_wait):
            yield

    @contextmanager
    def filling(self, name: str, *, keep: bool = False) -> Iterator[Path]:
        """A folder to fill within the block; `add` then makes it the model.  Hold the lock.

        It starts empty, whatever a killed process left, and goes when the block fails.  With `keep` it stays in both
        cases, for a source that resumes inside it.
        """
        folder = self.home.downloads / f"{name}.new"
        if not keep:
            shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True, exist_ok=True)
        self.home.models.mkdir(parents=True, exist_ok=True)
        try:
            yield folder
        except BaseException:
            if not keep:
                shutil.rmtree(folder, ignore_errors=True)
            raise

    def add(self, pulled: Pulled, folder: Path) -> Path:
        """Make a filled folder the model of that name, with its record; returns the checkpoint's path.

        What stands in the store is on the disk: a record that survives a power failure promises whole files.
        """
        if self.has(pulled.name):
            raise ModelError(f"the model {pulled.name!r} stands in the store already")
        text = json.dumps(asdict(pulled), indent=2, sort_keys=True) + "\n"
        (folder / RECORD).write_text(text, encoding="utf-8")
        shutil.rmtree(self.folder(pulled.name), ignore_errors=True)  # a folder without a record is no model
        sync_folder(folder)
        folder.rename(self.folder(pulled.name))
        sync(self.home.models)
        return self.model_path(pulled.name)
