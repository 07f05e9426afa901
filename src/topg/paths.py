"""Where ToPG keeps files: one home folder, named by TOPG_HOME, else in the user's cache folder.

<home>/models/      what `topg pull` fetched, a folder a model
<home>/converted/   converted models
<home>/downloads/   transfers under way, and what they resume from
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from topg.config import HOME_VARIABLE, check_variables
from topg.errors import ConfigError


@dataclass(frozen=True)
class Home:
    """The folders of one home.  Naming them creates nothing."""

    root: Path

    @classmethod
    def find(cls, environ: Mapping[str, str] = os.environ) -> Home:
        """$TOPG_HOME, else $XDG_CACHE_HOME/topg, else ~/.cache/topg.

        A relative TOPG_HOME counts from the working folder.  Raises ConfigError for one that is empty or no folder, and
        for an unknown TOPG_ variable, which may be a misspelt TOPG_HOME.
        """
        check_variables(environ)
        if HOME_VARIABLE in environ:
            return cls(_named_folder(environ[HOME_VARIABLE]))
        cache = Path(environ.get("XDG_CACHE_HOME", ""))
        # The XDG base directory specification has relative paths ignored.
        return cls((cache if cache.is_absolute() else Path.home() / ".cache") / "topg")

    @property
    def models(self) -> Path:
        return self.root / "models"

    @property
    def converted(self) -> Path:
        return self.root / "converted"

    @property
    def downloads(self) -> Path:
        return self.root / "downloads"


def _named_folder(text: str) -> Path:
    if not text:
        raise ConfigError(f"{HOME_VARIABLE} is empty; name a folder, or unset it")
    try:
        path = Path(text).expanduser().absolute()
    except RuntimeError as error:  # ~name of nobody
        raise ConfigError(f"{HOME_VARIABLE} is {text!r}: {error}; write the path out") from error
    if path.is_file():
        raise ConfigError(f"{HOME_VARIABLE} is {text!r}, a file; name a folder, or where one can be made")
    return path
