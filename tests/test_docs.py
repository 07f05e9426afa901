"""Documentation that could go stale is compared with what it describes."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from topg.cli.main import VERBS
from topg.cli.reference import cli_reference, config_reference, main

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
REWRITE = "run `python -m topg.cli.reference docs`"

same_argparse = pytest.mark.skipif(sys.version_info >= (3, 13), reason="argparse words its help differently from 3.13")


def test_the_configuration_reference_is_up_to_date() -> None:
    assert (DOCS / "config.md").read_text(encoding="utf-8") == config_reference(), REWRITE


@same_argparse
def test_the_command_line_reference_is_up_to_date() -> None:
    assert (DOCS / "cli.md").read_text(encoding="utf-8") == cli_reference(), REWRITE


def test_the_references_are_written_where_they_are_asked_for(tmp_path: Path) -> None:
    assert main([str(tmp_path)]) == 0
    assert (tmp_path / "config.md").read_text(encoding="utf-8") == config_reference()
    assert (tmp_path / "cli.md").read_text(encoding="utf-8") == cli_reference()
    assert main([]) == main([str(tmp_path / "missing")]) == 2


@pytest.mark.parametrize("name", ["LLM", "SamplingParams", "ModelConverter"])
def test_exported_names_are_documented(name: str) -> None:
    texts = [file.read_text(encoding="utf-8") for file in (ROOT / "README.md", *sorted(DOCS.glob("*.md")))]
    assert any(re.search(rf"\b{name}\b", text) for text in texts)


def test_commands_in_the_documentation_exist() -> None:
    for file in (ROOT / "README.md", *sorted(DOCS.glob("*.md"))):
        for line in re.findall(r"^(?:\$ )?topg (\w+)", file.read_text(encoding="utf-8"), re.MULTILINE):
            assert line in VERBS, f"{file.name} shows `topg {line}`"


def test_the_map_names_every_module_and_no_other() -> None:
    """docs/structure.md lists each module of src/topg once, under the names they have today."""
    package = ROOT / "src" / "topg"
    modules = {
        str(file.relative_to(package).with_suffix(""))
        for file in package.rglob("*.py")
        if not file.name.startswith("__")
    }
    table = (DOCS / "structure.md").read_text(encoding="utf-8").split("## Modules")[1].split("## Native files")[0]
    named = [name for row in re.findall(r"^\| (`.+?`) \|", table, re.MULTILINE) for name in re.findall(r"`(.+?)`", row)]
    assert sorted(named) == sorted(modules)


def test_the_map_names_every_native_file_and_no_other() -> None:
    native = ROOT / "native"
    files = {
        str(file.relative_to(native).with_suffix("")) for file in native.rglob("*") if file.suffix in {".h", ".cpp"}
    }
    table = (DOCS / "structure.md").read_text(encoding="utf-8").split("## Native files")[1]
    named = [name for row in re.findall(r"^\| (`.+?`) \|", table, re.MULTILINE) for name in re.findall(r"`(.+?)`", row)]
    assert sorted(named) == sorted(files)
