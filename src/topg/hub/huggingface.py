"""Pulling a checkpoint from the Hugging Face hub through its own client.

Taken are tensors (safetensors), settings and chat templates from the top of the repository.  Pickled weights and code
are never fetched.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from topg.errors import DownloadError, ModelNotFoundError, UnsupportedModelError
from topg.hub.download import require_space, sha256_of
from topg.hub.report import Report
from topg.hub.store import Pulled, Store

if TYPE_CHECKING:
    from huggingface_hub import HfApi
    from huggingface_hub.hf_api import ModelInfo

HUB_PREFIX = "hf:"
WANTED_SUFFIXES = (".safetensors", ".json", ".jinja")

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
    unknown or closed repository, UnsupportedModelError for one without safetensors, and DownloadError when it cannot be
    fetched.
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
    sizes = _wanted_sizes(spec, info)
    # The client resumes inside the folder it fills, so that what a cut left must stay.
    with store.filling(spec.store_name, keep=True) as folder:
        require_space(folder, sum(sizes.values()))
        report.note(f"downloading {len(sizes)} files of {spec.repo} at commit {info.sha}")
        with _client_errors(spec):
            api.snapshot_download(spec.repo, revision=info.sha, local_dir=folder, allow_patterns=sorted(sizes))
        shutil.rmtree(folder / ".cache", ignore_errors=True)  # the client's own records
        files = _checked_files(folder, sizes, spec)
        licence = str(info.card_data.get("license", "not stated")) if info.card_data else "not stated"
        return store.add(Pulled(spec.store_name, f"hf:{spec.repo}@{info.sha}", licence, files), folder)


def _wanted_sizes(spec: HubSpec, info: ModelInfo) -> dict[str, int]:
    """The files to fetch and their bytes."""
    files = {file.rfilename: file.size or 0 for file in info.siblings or ()}
    wanted = {name: size for name, size in files.items() if "/" not in name and name.endswith(WANTED_SUFFIXES)}
    if not any(name.endswith(".safetensors") for name in wanted):
        kinds = ", ".join(sorted({Path(name).suffix for name in files if Path(name).suffix})) or "no files"
        raise UnsupportedModelError(f"{spec.repo} holds no .safetensors weights (it has {kinds}); ToPG reads no others")
    return wanted


def _checked_files(folder: Path, sizes: dict[str, int], spec: HubSpec) -> dict[str, str]:
    """SHA-256 by file; raises DownloadError when a file is missing or not as long as the hub said."""
    for name, size in sizes.items():
        file = folder / name
        if not file.is_file() or (size and file.stat().st_size != size):
            raise DownloadError(f"{name} of {spec.repo} did not arrive whole; pull again")
    for other in folder.iterdir():
        if other.name not in sizes:
            other.unlink()  # an earlier commit had it, whose pull was cut
    return {name: sha256_of(folder / name) for name in sorted(sizes)}


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
