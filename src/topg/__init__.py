"""ToPG: inference for large language models, the same answer every time.

    from topg import LLM, SamplingParams

Importing the package loads nothing else; a name's module is loaded when the name is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from topg.llm import LLM as LLM
    from topg.sampling_params import SamplingParams as SamplingParams
    from topg.types import Delta as Delta
    from topg.types import GenerationResult as GenerationResult

__version__ = "0.1.0"

__all__ = ["LLM", "Delta", "GenerationResult", "SamplingParams", "__version__"]

_HOMES = {
    "Delta": "topg.types",
    "GenerationResult": "topg.types",
    "LLM": "topg.llm",
    "SamplingParams": "topg.sampling_params",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'topg' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
