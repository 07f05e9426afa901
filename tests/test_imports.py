"""Imports point one way, and the light parts stay light.

Every import statement counts, also inside functions and under TYPE_CHECKING: who names a type depends on it.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src"
PACKAGE = SOURCE / "topg"

# A module imports from its own layer and from those above it in this list.
LAYERS: tuple[tuple[str, ...], ...] = (
    ("errors", "wording", "progress", "types", "units", "files", "sampling_params"),
    ("config", "config_file", "config_kinds", "paths"),
    ("hub",),
    ("kv", "scheduling"),
    ("plan", "plan_cost", "ops", "precision"),
    ("models",),
    ("tokenizer", "converter", "sampling"),
    ("backends",),
    ("stages",),
    ("kv_budget", "loading", "llm", "benchmark"),
    ("cli", "__main__"),
)
RANK = {name: rank for rank, layer in enumerate(LAYERS) for name in layer}

USERS_OF_HUB = {"hub", "converter", "loading", "llm", "cli"}
LIGHT_PARTS = (
    "errors", "wording", "types", "units", "files", "config", "config_kinds", "paths", "sampling_params", "kv",
    "scheduling",
)  # fmt: skip

FILES = sorted(PACKAGE.rglob("*.py"))


def module_name(file: Path) -> str:
    """`topg.kv.pages` for src/topg/kv/pages.py; a package is named by its folder."""
    parts = file.relative_to(SOURCE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def part_of(module: str) -> str:
    """The name below `topg` that a module belongs to; empty for the package itself."""
    return module.partition(".")[2].partition(".")[0]


MODULES = {module_name(file) for file in FILES}


def imported_modules(file: Path) -> Iterator[tuple[int, str]]:
    """Line and full name of every module that a file imports."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}:{node.lineno}: imports are absolute here"
            for alias in node.names:
                member = f"{node.module}.{alias.name}"
                yield node.lineno, member if member in MODULES else str(node.module)


def topg_imports(file: Path) -> Iterator[tuple[int, str]]:
    """Line and part (`kv`, `ops`, ...) of every import from ToPG; importing `topg` itself, for its version, is free."""
    for line, module in imported_modules(file):
        if module.split(".")[0] == "topg" and part_of(module):
            yield line, part_of(module)


def test_every_part_has_a_layer() -> None:
    assert {part_of(module) for module in MODULES} - {""} <= set(RANK)


@pytest.mark.parametrize("file", FILES, ids=module_name)
def test_imports_point_one_way(file: Path) -> None:
    part = part_of(module_name(file))
    if not part:
        return  # the front door leads everywhere
    wrong = [f"line {line}: {other}" for line, other in topg_imports(file) if RANK[other] > RANK[part]]
    assert not wrong, f"{module_name(file)} imports from a layer that builds on it"


def test_what_computes_knows_nothing_of_the_hub() -> None:
    users = {part_of(module_name(file)) for file in FILES for _, other in topg_imports(file) if other == "hub"}
    assert users <= USERS_OF_HUB


def test_only_the_torch_back_end_imports_torch() -> None:
    users = {file for file in FILES for _, module in imported_modules(file) if module.split(".")[0] == "torch"}
    assert all(file.is_relative_to(PACKAGE / "backends" / "torch") for file in users)


@pytest.mark.parametrize("part", LIGHT_PARTS)
def test_light_parts_need_the_standard_library_only(part: str) -> None:
    files = [file for file in FILES if part_of(module_name(file)) == part]
    roots = {module.split(".")[0] for file in files for _, module in imported_modules(file)}
    assert files
    assert roots <= {*sys.stdlib_module_names, "topg"}


def run_python(code: str) -> str:
    command = [sys.executable, "-c", code]
    return subprocess.run(
        command, capture_output=True, text=True, check=True, env={"PYTHONPATH": str(SOURCE)}, timeout=60
    ).stdout


@pytest.mark.parametrize("module", ["topg", "topg.cli.main", "topg.config", "topg.kv.pages"])
def test_what_is_imported_at_once_is_the_standard_library(module: str) -> None:
    code = f"import sys; old = set(sys.modules); import {module}; print(*(set(sys.modules) - old))"
    loaded = {name.split(".")[0] for name in run_python(code).split()}
    assert "topg" in loaded
    assert {name for name in loaded if not name.startswith("_")} <= {*sys.stdlib_module_names, "topg"}
