"""From what a user calls a model to an opened converted model; a source is converted once, into the cache.

The cache folder's name holds the source's name, the recipe, and a key over format version, recipe and every file's
path, size and time of change: a source that changed is converted anew, one that did not never is.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

from topg.converter.format import ConvertedModel, is_converted
from topg.converter.manifest import FORMAT_VERSION
from topg.errors import ModelError, ModelNotFoundError, PrecisionError
from topg.files import FOLDER_SUFFIXES, GGUF_SUFFIX, belongs_to_checkpoint, is_gguf
from topg.hub.lock import file_lock
from topg.hub.resolve import resolve
from topg.hub.store import GGUF_FILE, Store
from topg.paths import Home
from topg.precision.recipes import DEFAULT_RECIPE, RECIPE_NAMES
from topg.progress import progress_bar

KEY_DIGITS = 16
MAX_NAME_CHARS = 40  # of the source, in the name of its cache folder: 160 bytes at most

Notify = Callable[[str], None]


def open_model(model: str | Path, quant: str | None, home: Home, notify: Notify) -> ConvertedModel:
    """Open a converted folder, or convert a source (pulled name, Hugging Face folder, GGUF file) on first use.

    `quant` is the recipe for a source, by default int8; a folder that is converted already must have it.  `notify` gets
    the sentences that the user should see; on a terminal a conversion shows a bar.

    Every file is hashed: a damaged one is refused by name, or made again where it is our own copy of a source.  Raises
    ModelError and PrecisionError.
    """
    path = resolve(str(model), Store(home))
    if is_converted(path):
        converted = _with_recipe(ConvertedModel.open(path), quant)
        converted.verify()
        return converted
    return _cached(path, quant or DEFAULT_RECIPE, home, notify)


def cache_folder(source: Path, recipe: str, home: Home) -> Path:
    """Where the converted form of a source stands, whether it exists or not.  Reads names, sizes and times only."""
    files = [(str(file), file.stat().st_size, file.stat().st_mtime_ns) for file in _source_files(source)]
    key = hashlib.sha256(json.dumps([FORMAT_VERSION, recipe, files]).encode()).hexdigest()[:KEY_DIGITS]
    return home.converted / f"{model_name(source)[:MAX_NAME_CHARS]}-{recipe}-{key}"


def model_name(source: Path) -> str:
    """What a source is called: its file or folder, or the store's name for a pulled GGUF."""
    path = source.resolve()
    return path.parent.name if path.name == GGUF_FILE else path.stem


def _with_recipe(model: ConvertedModel, quant: str | None) -> ConvertedModel:
    if quant is not None and quant != model.manifest.recipe:
        raise PrecisionError(
            f"{model.folder} is converted to {model.manifest.recipe}, not to {quant}; leave quant out, or give the "
            "source it was made from"
        )
    return model


def _cached(source: Path, recipe: str, home: Home, notify: Notify) -> ConvertedModel:
    """The converted form of a source, made now if it is not there.  Two processes at once convert it once."""
    if recipe not in RECIPE_NAMES:
        raise PrecisionError(f"no recipe is called {recipe!r}; recipes: {', '.join(RECIPE_NAMES)}")
    folder = cache_folder(source, recipe, home)
    lock = folder.with_name(f"{folder.name}.lock")
    with file_lock(lock, lambda: notify(f"waiting for another process to convert {source}")):
        return _open_cached(folder, notify) or _convert(source, folder, recipe, notify)


def _open_cached(folder: Path, notify: Notify) -> ConvertedModel | None:
    """The cached model if it is there and whole; what is damaged is removed."""
    if not os.path.lexists(folder):
        return None
    try:
        model = ConvertedModel.open(folder)
        model.verify()
        return model
    except ModelError as error:
        notify(f"the cached model is damaged and is made again: {error}")
        _remove(folder)
        return None


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def _convert(source: Path, folder: Path, recipe: str, notify: Notify) -> ConvertedModel:
    from topg.converter.convert import ModelConverter  # rarely used, and slow to import

    notify(f"converting {source} to {recipe}, once; it is kept in {folder}")
    with progress_bar() as bar:
        conversion = ModelConverter(
            source, folder, recipe, name=model_name(source),
            progress=lambda done, total: bar.show("converting", done, total),
        ).run()  # fmt: skip
    for warning in conversion.warnings:
        notify(f"warning: {warning}")
    return ConvertedModel.open(folder)


def _source_files(source: Path) -> list[Path]:
    resolved = source.resolve()
    if resolved.is_file():
        return [resolved]
    files = sorted(file for file in resolved.iterdir() if is_gguf(file) or belongs_to_checkpoint(file.name))
    if not files:
        suffixes = ", ".join((GGUF_SUFFIX, *FOLDER_SUFFIXES))
        raise ModelNotFoundError(f"{source} holds no model: none of its files ends in {suffixes}")
    return files
