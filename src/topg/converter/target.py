"""Where a converted model may be written: checked in full before any work is done."""

from __future__ import annotations

import os
from pathlib import Path

from topg.converter.format import is_converted
from topg.converter.manifest import MANIFEST_FILE, is_own_file
from topg.errors import ConfigError
from topg.wording import shown

MAX_FILE_BYTES = 255
MAX_NAME_BYTES = MAX_FILE_BYTES - len("..replaced")  # what stands beside a folder while it is written has a longer name
MAX_PATH_BYTES = 4000


def check_target(target: Path, overwrite: bool) -> None:
    """Raises ConfigError unless a folder can be made at `target`, or is a converted model that may be overwritten.

    Only a converted model is ever replaced: never a folder that holds anything else.
    """
    _check_name(target)
    _check_parents(target)
    if not overwrite or not os.path.lexists(target):
        return
    if target.is_symlink():
        raise ConfigError(f"{target} is a symbolic link and is not overwritten; name the folder it leads to")
    if not target.is_dir():
        raise ConfigError(f"{target} is a file, not a converted model, and is not overwritten; give another name")
    if not is_converted(target):
        raise ConfigError(
            f"{target} has no {MANIFEST_FILE}: it is not a converted model and is not overwritten; give another name,"
            " or remove it"
        )
    strangers = sorted(entry.name for entry in target.iterdir() if not is_own_file(entry.name))
    if strangers:
        raise ConfigError(
            f"{target} also holds {shown(strangers[0])}, which is no part of a converted model; move it away"
        )


def _check_name(target: Path) -> None:
    if not target.name:
        raise ConfigError(f"{shown(str(target))} cannot be written; name a folder that does not exist yet")
    if "\0" in str(target):
        raise ConfigError(f"{shown(str(target))} holds a NUL character, which no name can; give another name")
    try:
        path, name = os.fsencode(target.absolute()), os.fsencode(target.name)
    except UnicodeEncodeError as error:
        raise ConfigError(f"{shown(str(target))} cannot be written as the name of a file; give another name") from error
    if max(map(len, path.split(b"/"))) > MAX_FILE_BYTES or len(name) > MAX_NAME_BYTES or len(path) > MAX_PATH_BYTES:
        raise ConfigError(
            f"{shown(str(target))} is too long; a name may have {MAX_NAME_BYTES} bytes, a path {MAX_PATH_BYTES}"
        )


def _check_parents(target: Path) -> None:
    existing = next((parent for parent in target.absolute().parents if os.path.lexists(parent)), None)
    if existing is not None and not existing.is_dir():
        raise ConfigError(f"{target} cannot be written: {existing} is not a folder; give another place")
