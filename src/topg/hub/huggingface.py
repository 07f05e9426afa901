"""Pulling a checkpoint from the Hugging Face hub through its own client.

Taken are tensors (safetensors), settings and chat templates from the top of the repository.  Pickled weights and code
are never fetched.
"""

from __future__ import annotations

import hashlib
import re
import shutil
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from topg.errors import DownloadError, ModelNotFoundError, UnsupportedModelError
from topg.files import CHUNK_BYTES, belongs_to_checkpoint, require_space, sha256_of
from topg.hub.report import Report
from topg.hub.store import SPACE_ADVICE, Pulled, Store

if TYPE_CHECKING:
    from huggingface_hub import HfApi
    from huggingface_hub.hf_api import ModelInfo, RepoSibling

HUB_PREFIX = "hf:"
PROGRESS_SECONDS = 0.2

_SPEC = re.compile(r"hf:(?P<repo>[\w.-]+/[\w.-]+)(?:@(?P<revision>[\w./-]+))?", re.ASCII)


@dataclass(frozen=True)
class HubSpec:
    """A repository of the hub, and the branch, tag or commit wanted of it (None: its main branch)."""

    repo: str
    revision: str | None

    @classmethod
    def parse(cls, text: str) -> HubSpec:
        """From `hf:ORG/NAME` or `hf:ORG/NAME@REVISION`; raises ModelNotFoundError for anything else."""
        match = _SPEC.fullmatch(text)
        if match is None:
            raise ModelNotFoundError(f"{text!r} is no repository of the hub; write hf:ORG/NAME or hf:ORG/NAME@REVISION")
        return cls(match["repo"], match["revision"])

    @property
    def store_name(self) -> str:
        """Its name in the store: `hf--ORG--NAME`, and `--REVISION` when one is asked for."""
        parts = ["hf", *self.repo.split("/"), *(self.revision.split("/") if self.revision else ())]
        return "--".join(parts)


def pull_huggingface(spec: HubSpec, store: Store, report: Report, endpoint: str | None = None) -> Path:
    """Fetch a repository unless it is there, and return its folder.

    `endpoint` is the hub's address, None for the client's own setting (HF_ENDPOINT).  Raises ModelNotFoundError for an
    unknown or closed repository, UnsupportedModelError for one without safetensors, DownloadError when it cannot be
    fetched or is not what the hub said, and CapacityError when the disk has no room for what is missing.
    """
    name = spec.store_name
    with store.locked(name, lambda: report.note(f"another pull of {spec.repo} is running; waiting for it")):
        if store.has(name):
            report.note(f"{spec.repo} is there already")
            return store.model_path(name)
        with _client_errors(spec):
            # The client is heavy to import; it reads HF_ENDPOINT and HF_TOKEN itself.
            from huggingface_hub import HfApi

            info = HfApi(endpoint).model_info(spec.repo, revision=spec.revision, files_metadata=True)
        return _fetch(spec, info, HfApi(endpoint), store, report)


def _fetch(spec: HubSpec, info: ModelInfo, api: HfApi, store: Store, report: Report) -> Path:
    wanted = _wanted(spec, info)
    size = sum(file.size or 0 for file in wanted.values())
    # The client resumes inside the folder it fills, so that what a cut left must stay.
    with store.filling(spec.store_name, keep=True) as folder:
        require_space(folder, size - _bytes_below(folder), SPACE_ADVICE)
        report.note(f"downloading {len(wanted)} files of {spec.repo} at commit {info.sha}")
        with _client_errors(spec), _bars_of_client_off(), _watched(folder, size, spec.repo, report):
            api.snapshot_download(spec.repo, revision=info.sha, local_dir=folder, allow_patterns=sorted(wanted))
        shutil.rmtree(folder / ".cache", ignore_errors=True)  # the client's own records
        files = _checked_files(folder, wanted, spec)
        licence = str(info.card_data.get("license", "not stated")) if info.card_data else "not stated"
        return store.add(Pulled(spec.store_name, f"hf:{spec.repo}@{info.sha}", licence, files), folder)


def _wanted(spec: HubSpec, info: ModelInfo) -> dict[str, RepoSibling]:
    """The files to fetch, by name, with what the hub tells of them."""
    files = {file.rfilename: file for file in info.siblings or ()}
    wanted = {name: file for name, file in files.items() if "/" not in name and belongs_to_checkpoint(name)}
    if not any(name.endswith(".safetensors") for name in wanted):
        kinds = ", ".join(sorted({Path(name).suffix for name in files if Path(name).suffix})) or "no files"
        raise UnsupportedModelError(
            f"{spec.repo} holds no .safetensors weights that ToPG reads (it has {kinds}); look for another "
            "repository or revision of the model"
        )
    return wanted


def _checked_files(folder: Path, wanted: Mapping[str, RepoSibling], spec: HubSpec) -> dict[str, str]:
    """SHA-256 by file; raises DownloadError, and removes the file, when one is not what the hub said."""
    for other in folder.iterdir():
        if other.name not in wanted:
            other.unlink()  # an earlier commit had it, whose pull was cut
    return {name: _checked(folder / name, told, spec) for name, told in sorted(wanted.items())}


def _checked(file: Path, told: RepoSibling, spec: HubSpec) -> str:
    if not file.is_file():
        raise DownloadError(f"{file.name} of {spec.repo} did not arrive; pull again")
    digest, expected = sha256_of(file), told.lfs.sha256 if told.lfs is not None else None
    whole = told.size in (None, file.stat().st_size)
    # Small files are in git itself, which knows them by a hash of its own; of the others git holds a pointer only.
    right = digest == expected if expected is not None else told.blob_id in (None, _git_blob_id(file))
    if not (whole and right):
        file.unlink()  # or the client would take it for good
        raise DownloadError(f"{file.name} of {spec.repo} is not what the hub said it would be; pull again")
    return digest


def _git_blob_id(file: Path) -> str:
    """The name git gives a file's contents: SHA-1 over a header with the size, and the contents."""
    digest = hashlib.sha1(b"blob %d\0" % file.stat().st_size, usedforsecurity=False)
    with file.open("rb") as stream:
        while chunk := stream.read(CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def _bytes_below(folder: Path) -> int:
    """Bytes of all files in a folder, those under way in the client's own folder included."""
    sizes = []
    for file in folder.rglob("*"):
        with suppress(FileNotFoundError):  # the client moves files while they are counted
            sizes.append(file.stat().st_size if file.is_file() else 0)
    return sum(sizes)


@contextmanager
def _watched(folder: Path, total: int, what: str, report: Report) -> Iterator[None]:
    """Reports how much of `total` stands in the folder while the block fills it.

    The client tells of bytes differently from version to version; the disk tells the same in all.
    """
    done = threading.Event()

    def watch() -> None:
        while not done.wait(PROGRESS_SECONDS):
            there = _bytes_below(folder)
            if there < total:
                report.progress(what, there, total)

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield
    finally:
        done.set()
        watcher.join()
    report.progress(what, total, total)


@contextmanager
def _bars_of_client_off() -> Iterator[None]:
    from huggingface_hub.utils import (  # type: ignore[attr-defined]  # public, but not marked as exported
        are_progress_bars_disabled,
        disable_progress_bars,
        enable_progress_bars,
    )

    if are_progress_bars_disabled():
        yield
        return
    disable_progress_bars()
    try:
        yield
    finally:
        enable_progress_bars()


@contextmanager
def _client_errors(spec: HubSpec) -> Iterator[None]:
    from huggingface_hub import errors

    try:
        yield
    except errors.GatedRepoError as error:
        raise ModelNotFoundError(
            f"{spec.repo} is gated: accept its terms on the hub and set HF_TOKEN to a token that may read it"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise ModelNotFoundError(f"{spec.repo} has no revision {spec.revision!r}") from error
    except errors.RepositoryNotFoundError as error:
        raise ModelNotFoundError(
            f"the hub has no repository {spec.repo!r}, or it is private and HF_TOKEN does not open it"
        ) from error
    except errors.HFValidationError as error:
        raise ModelNotFoundError(f"{spec.repo!r} is no repository name: {error}") from error
    except (errors.OfflineModeIsEnabled, errors.LocalEntryNotFoundError) as error:
        raise DownloadError(
            f"{spec.repo} cannot be fetched: the hub is out of reach, or HF_HUB_OFFLINE is set"
        ) from error
    except (OSError, errors.HTTPError) as error:  # type: ignore[attr-defined]  # of whichever HTTP library it uses
        reason = " ".join(str(error).split()) or type(error).__name__
        raise DownloadError(f"{spec.repo} cannot be fetched from the hub: {reason}") from error
