"""Where files are kept."""

from __future__ import annotations

from pathlib import Path

import pytest

from topg.errors import ConfigError
from topg.paths import Home


@pytest.mark.parametrize(
    ("environ", "root"),
    [
        ({"TOPG_HOME": "/data/topg", "XDG_CACHE_HOME": "/cache"}, Path("/data/topg")),
        ({"TOPG_HOME": "~/topg"}, Path.home() / "topg"),
        ({"TOPG_HOME": "here"}, Path.cwd() / "here"),
        ({"XDG_CACHE_HOME": "/cache"}, Path("/cache/topg")),
        ({"XDG_CACHE_HOME": "relative"}, Path.home() / ".cache" / "topg"),
        ({"XDG_CACHE_HOME": ""}, Path.home() / ".cache" / "topg"),
        ({}, Path.home() / ".cache" / "topg"),
    ],
)
def test_the_home(environ: dict[str, str], root: Path) -> None:
    home = Home.find(environ)
    assert home.root == root
    assert (home.models, home.converted, home.downloads) == (root / "models", root / "converted", root / "downloads")


def test_an_empty_home_is_refused() -> None:
    with pytest.raises(ConfigError, match="TOPG_HOME is empty"):
        Home.find({"TOPG_HOME": ""})


def test_a_home_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(ConfigError, match=r"TOPG_HOME is '.*', a file; name a folder"):
        Home.find({"TOPG_HOME": str(tmp_path / "file")})


def test_a_home_of_nobody_is_refused() -> None:
    with pytest.raises(ConfigError, match="TOPG_HOME is '~no-such-user/x'"):
        Home.find({"TOPG_HOME": "~no-such-user/x"})


def test_a_misspelt_home_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"TOPG_HOEM is not a variable of ToPG.*did you mean 'TOPG_HOME'\?"):
        Home.find({"TOPG_HOEM": "/data"})
