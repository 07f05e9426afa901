"""The names that users import."""

from __future__ import annotations

import importlib
import re

import pytest

import topg

PUBLIC = {
    "topg": ("LLM", "Delta", "GenerationResult", "SamplingParams", "__version__"),
    "topg.converter": ("ModelConverter",),
    "topg.hub": ("resolve",),
}


@pytest.mark.parametrize("module", PUBLIC)
def test_public_names_exist_and_are_all_that_is_exported(module: str) -> None:
    package = importlib.import_module(module)
    assert sorted(package.__all__) == sorted(PUBLIC[module])
    for name in PUBLIC[module]:
        assert getattr(package, name) is not None


@pytest.mark.parametrize(
    ("module", "name"), [(module, name) for module, names in PUBLIC.items() for name in names if name != "__version__"]
)
def test_public_names_are_explained(module: str, name: str) -> None:
    assert getattr(importlib.import_module(module), name).__doc__


def test_the_version_is_a_version() -> None:
    assert re.fullmatch(r"\d+\.\d+\.\d+", topg.__version__)


def test_names_that_are_loaded_on_demand_are_listed() -> None:
    assert set(topg.__all__) == set(dir(topg))


def test_result_types_are_those_that_answers_have() -> None:
    types = importlib.import_module("topg.types")
    assert (topg.Delta, topg.GenerationResult) == (types.Delta, types.GenerationResult)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'topg' has no attribute 'LMM'"):
        topg.LMM  # noqa: B018
