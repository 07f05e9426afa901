"""From a Hugging Face checkpoint or a GGUF file to a model that ToPG runs.

ModelConverter(hf_model_name="smollm2-135m", output_dir="smol-int8", quant_config="int8").convert()
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from topg.converter.convert import ModelConverter as ModelConverter

__all__ = ["ModelConverter"]


def __getattr__(name: str) -> object:
    """Import the converter when it is asked for: running a converted model does not need it."""
    if name != "ModelConverter":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from topg.converter.convert import ModelConverter

    return ModelConverter
