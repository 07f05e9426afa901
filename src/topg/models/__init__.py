"""Model families.  The file name is the Hugging Face `model_type`, its `ARCHITECTURE` the whole registration."""

from __future__ import annotations

import pkgutil
from functools import cache
from importlib import import_module

from topg.errors import UnsupportedModelError
from topg.models.base import Architecture
from topg.wording import shown

_SHARED_MODULES = {"base", "settings"}


@cache
def _architectures() -> dict[str, Architecture]:
    names = sorted(module.name for module in pkgutil.iter_modules(__path__) if module.name not in _SHARED_MODULES)
    return {name: import_module(f"{__name__}.{name}").ARCHITECTURE for name in names}


def supported() -> tuple[str, ...]:
    """Every supported `model_type`, sorted."""
    return tuple(_architectures())


def architecture_for_huggingface(model_type: str, class_names: list[str]) -> Architecture:
    """The family of a config.json; `class_names` is its `architectures` entry, empty when it has none.

    Raises UnsupportedModelError for an unknown type, or a head other than the language model's.
    """
    architecture = _architectures().get(model_type)
    if architecture is None:
        raise UnsupportedModelError(
            f"model_type {shown(model_type)} is not supported; supported: {', '.join(supported())}"
        )
    if class_names and architecture.causal_lm_class not in class_names:
        raise UnsupportedModelError(
            f"config.json names {', '.join(map(shown, class_names[:5]))}; of {model_type} models only"
            f" {architecture.causal_lm_class} is supported"
        )
    return architecture


def architecture_for_gguf(name: str) -> Architecture:
    """The family of a GGUF file's `general.architecture`; raises UnsupportedModelError for an unknown one."""
    known = {arch.gguf_architecture: arch for arch in _architectures().values() if arch.gguf_architecture}
    if name not in known:
        raise UnsupportedModelError(
            f"GGUF architecture {shown(name)} is not supported; supported: {', '.join(sorted(map(str, known)))}"
        )
    return known[name]
