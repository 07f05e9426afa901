"""What the converter reads from, whatever the format: a Hugging Face folder or a GGUF file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt

from topg.converter.file_blocks import Bytes
from topg.converter.format import is_converted
from topg.converter.gguf import GgufCheckpoint
from topg.converter.huggingface import CONFIG, HuggingFaceCheckpoint
from topg.converter.wording import listed
from topg.errors import CheckpointError, ModelNotFoundError, UnsupportedModelError
from topg.models.base import Checkpoint

SourceKind = Literal["huggingface", "gguf"]
PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


class CheckpointSource(Checkpoint, Protocol):
    """An opened checkpoint.  Tensors are read in blocks of rows, so a model larger than memory can be converted."""

    @property
    def kind(self) -> SourceKind:
        """The format."""

    @property
    def path(self) -> Path:
        """The folder or file."""

    @property
    def architecture_name(self) -> str:
        """The config's model_type, or the GGUF's general.architecture."""

    @property
    def warnings(self) -> Sequence[str]:
        """Sentences to show to the user."""

    @property
    def generation(self) -> Mapping[str, Any]:
        """Recommended sampling values as in a generation_config.json; empty when there are none."""

    @property
    def chat_template(self) -> str | None:
        """The chat template as text."""

    @property
    def tokenizer_file(self) -> Path | None:
        """The tokenizer.json; None when the tokenizer stands in `tokenizer_settings` (GGUF)."""

    @property
    def tokenizer_settings(self) -> Mapping[str, Any]:
        """The parsed tokenizer_config.json, or a GGUF's metadata below "tokenizer." under their full keys."""

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor, rows first; raises CheckpointError when there is no such tensor."""

    def type_name(self, name: str) -> str:
        """Storage type of a tensor: "bfloat16" and so on, or ggml's name ("Q4_K")."""

    def check_type(self, name: str) -> None:
        """Raises UnsupportedModelError, naming tensor and type, unless `rows` can read it."""

    def rows(self, name: str, start: int, stop: int) -> npt.NDArray[np.float32]:
        """Rows start..stop along the first dimension in float32; raises IndexError beyond the tensor."""

    def raw_rows(self, name: str, start: int, stop: int) -> Bytes:
        """The stored bytes of rows start..stop of a matrix, [stop - start, bytes per row]."""

    def files(self) -> list[Path]:
        """Every file the checkpoint consists of."""


def open_source(path: str | Path) -> CheckpointSource:
    """Open a Hugging Face model folder, a .gguf file, or a folder with exactly one .gguf file.

    Raises ModelNotFoundError saying what was found instead, and what opening the checkpoint raises.
    """
    path = Path(path)
    if is_converted(path):
        raise CheckpointError(
            f"{path} is a converted model already; run it as it is, or give the source it was made from"
        )
    if path.is_dir():
        return _open_folder(path)
    if not path.is_file():
        raise ModelNotFoundError(f"there is no model at {path}: neither a file nor a folder")
    if path.suffix.lower() != ".gguf":
        raise ModelNotFoundError(f"{path} is not a .gguf file; for a Hugging Face model give its folder")
    return GgufCheckpoint(path)


def _open_folder(folder: Path) -> CheckpointSource:
    names = sorted(entry.name for entry in folder.iterdir())
    if any(name.endswith((".safetensors", ".safetensors.index.json")) for name in names):
        _refuse_adapter(folder, names)
        return HuggingFaceCheckpoint(folder)
    ggufs = [name for name in names if name.lower().endswith(".gguf")]
    if len(ggufs) == 1:
        return GgufCheckpoint(folder / ggufs[0])
    if ggufs:
        raise CheckpointError(f"{folder} holds {len(ggufs)} GGUF files, name one of them: {listed(ggufs)}")
    pickles = [name for name in names if name.lower().endswith(PICKLE_SUFFIXES)]
    if pickles:
        raise UnsupportedModelError(
            f"{folder} holds its weights as {listed(pickles)}: pickle files, which can run code and are never opened."
            " Convert them to safetensors first, or take a revision of the model that has them"
        )
    raise ModelNotFoundError(f"{folder} holds no .safetensors or .gguf file; it holds {listed(names) or 'nothing'}")


def _refuse_adapter(folder: Path, names: Sequence[str]) -> None:
    if CONFIG not in names and "adapter_config.json" in names:
        raise UnsupportedModelError(f"{folder} holds an adapter, not a model: merge it into its base model first")
