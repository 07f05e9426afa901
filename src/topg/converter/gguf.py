"""A model in one GGUF file: settings, tokenizer and weights."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from math import prod
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from topg.converter.file_blocks import Bytes, check_rows
from topg.converter.gguf_file import GgufFile
from topg.converter.wording import listed
from topg.errors import CheckpointError, UnsupportedModelError
from topg.wording import shown

QUANTIZATION_VERSION = 2
UNVERSIONED_TYPES = ("F32", "F16", "BF16")
SAMPLING_KEYS: Mapping[str, str] = {
    "general.sampling.temp": "temperature",
    "general.sampling.top_k": "top_k",
    "general.sampling.top_p": "top_p",
    "general.sampling.min_p": "min_p",
    "general.sampling.penalty_repeat": "repetition_penalty",
}
TEMPLATE_KEY = "tokenizer.chat_template"


class GgufCheckpoint:
    """An opened and checked GGUF model.

    Opening raises what `GgufFile` raises, CheckpointError without architecture, and UnsupportedModelError for one part
    of a split model and for files that hold no whole model.
    `warnings` are sentences that the user should see.
    """

    kind: Literal["gguf"] = "gguf"
    tokenizer_file: None = None

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.file = GgufFile(self.path)
        self.metadata: Mapping[str, Any] = self.file.metadata
        _refuse_other_than_model(self.file)
        _refuse_split(self.file)
        _check_quantisation_version(self.file)
        self.architecture_name = _text(self.file, "general.architecture")
        self.settings: Mapping[str, Any] = _settings(self.file, f"{self.architecture_name}.")
        self.warnings: list[str] = _template_warnings(self.file)

    @property
    def tokenizer_settings(self) -> Mapping[str, Any]:
        """The metadata whose keys start with "tokenizer."."""
        return {key: value for key, value in self.metadata.items() if key.startswith("tokenizer.")}

    @property
    def chat_template(self) -> str | None:
        """The model's chat template."""
        return _text(self.file, TEMPLATE_KEY) if TEMPLATE_KEY in self.metadata else None

    @property
    def generation(self) -> Mapping[str, Any]:
        """Recommended sampling values by their names in a generation_config.json."""
        return {name: self.metadata[key] for key, name in SAMPLING_KEYS.items() if key in self.metadata}

    @property
    def tensor_names(self) -> Collection[str]:
        """Names of all stored tensors."""
        return self.file.tensors.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor, rows first."""
        return self.file.tensor(name).shape

    def type_name(self, name: str) -> str:
        """Storage type of a tensor by ggml's name ("Q4_K")."""
        return self.file.tensor(name).type_name

    def check_type(self, name: str) -> None:
        """Raises UnsupportedModelError unless the tensor's values can be read as float32."""
        self.file.check_type(name)

    def vector(self, name: str) -> npt.NDArray[np.float32]:
        """A one-dimensional tensor in float32."""
        if len(self.shape(name)) != 1:
            raise CheckpointError(
                f"{self.path}: tensor {shown(name)} has shape {list(self.shape(name))}; expected a vector"
            )
        vector: npt.NDArray[np.float32] = self.file.dequantise(name)[0]
        return vector

    def rows(self, name: str, start: int, stop: int) -> npt.NDArray[np.float32]:
        """Rows start..stop along the first dimension in float32; memory in proportion to their number."""
        shape = self.shape(name)
        check_rows(name, start, stop, shape[0])
        if len(shape) == 1:
            return self.vector(name)[start:stop]
        inner = prod(shape[1:-1])
        values = self.file.dequantise(name, slice(start * inner, stop * inner))
        return values.reshape(stop - start, *shape[1:])

    def raw_rows(self, name: str, start: int, stop: int) -> Bytes:
        """The stored blocks of rows start..stop of a matrix, [stop - start, bytes per row]."""
        if len(self.shape(name)) != 2:
            raise CheckpointError(
                f"{self.path}: tensor {shown(name)} has shape {list(self.shape(name))}; expected a matrix"
            )
        return self.file.read_raw(name, slice(start, stop))

    def files(self) -> list[Path]:
        """The one file."""
        return [self.path]


def _text(file: GgufFile, key: str) -> str:
    value = file.metadata.get(key)
    if not isinstance(value, str) or not value:
        raise CheckpointError(f"{file.path}: metadata {shown(key)} must be a text, not {shown(value)}")
    return value


def _settings(file: GgufFile, prefix: str) -> dict[str, Any]:
    """All metadata, the architecture's keys without their prefix."""
    settings: dict[str, Any] = {}
    for key, value in file.metadata.items():
        short = key.removeprefix(prefix)
        if short in settings:
            raise CheckpointError(
                f"{file.path}: metadata {shown(short)} occurs with and without {shown(prefix)} before it"
            )
        settings[short] = value
    return settings


def _refuse_other_than_model(file: GgufFile) -> None:
    kind = file.metadata.get("general.type", "model")
    if kind != "model":
        raise UnsupportedModelError(
            f"{file.path} holds a GGUF of type {shown(kind)}, not a model: give the model's own file"
            + ("; merge the adapter into its base model first" if kind == "adapter" else "")
        )
    if not file.tensors:
        raise UnsupportedModelError(f"{file.path} holds no weights (a vocabulary only): give the model's own file")


def _refuse_split(file: GgufFile) -> None:
    count = file.metadata.get("split.count", 1)
    if count not in (0, 1):
        raise UnsupportedModelError(
            f"{file.path} is one of {shown(count)} parts of a split model; join them first with"
            " llama-gguf-split --merge <first part> <joined file>"
        )


def _check_quantisation_version(file: GgufFile) -> None:
    version = file.metadata.get("general.quantization_version", QUANTIZATION_VERSION)
    quantised = any(tensor.type_name not in UNVERSIONED_TYPES for tensor in file.tensors.values())
    if quantised and version != QUANTIZATION_VERSION:
        raise UnsupportedModelError(
            f"{file.path} was quantised by version {shown(version)} of the GGUF block layouts; version"
            f" {QUANTIZATION_VERSION} is read: quantise the original model again with a current tool"
        )


def _template_warnings(file: GgufFile) -> list[str]:
    others = sorted(key for key in file.metadata if key.startswith(f"{TEMPLATE_KEY}."))
    return [f"{file.path}: only the default chat template is used; not used: {listed(others)}"] if others else []
