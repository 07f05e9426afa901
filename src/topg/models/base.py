"""What a model file provides: how a checkpoint's config and tensors become a plan.

One file per Hugging Face `model_type`; the file name is the type.  It ends in `ARCHITECTURE = <class>()`, which is
the whole registry.  A variant imports its parent and overrides the method in which it differs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import numpy as np
import numpy.typing as npt

from topg.ops import ActivationKind, Rope
from topg.plan import Plan
from topg.precision.recipes import Role

RowIndex = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Source:
    """Where a tensor comes from in one kind of checkpoint.

    `rows` picks and orders rows of the stored tensor (None: all of them as they are), `stored_rows` is how many the
    stored tensor has then.  `offset` is added to every value (Gemma stores its norm weights minus one).
    """

    name: str
    rows: RowIndex | None = None
    stored_rows: int | None = None
    offset: float = 0.0


@dataclass(frozen=True, eq=False)
class TensorSpec:
    """A tensor the plan uses: its name in the converted model, what it is for, and where each format keeps it."""

    name: str
    role: Role
    shape: tuple[int, ...]
    layer: int | None
    huggingface: Source
    gguf: Source

    def stored_shape(self, source: Source) -> tuple[int, ...]:
        """The shape the checkpoint's tensor must have."""
        return (source.stored_rows or self.shape[0], *self.shape[1:])


@dataclass(frozen=True)
class DecoderConfig:
    """A decoder in canonical terms, whatever file it came from.  Lengths are in tokens, widths in values.

    `windows` holds one entry per layer: the sliding window in tokens, or None for full attention; `ropes` likewise.
    `notes` are settings of the checkpoint that have no effect on the plan, in words for the user.
    """

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    context: int
    norm_eps: float
    activation: ActivationKind
    tied: bool
    ropes: tuple[Rope, ...]
    windows: tuple[int | None, ...]
    query_scale: float
    qkv_bias: bool = False
    attention_output_bias: bool = False
    mlp_bias: bool = False
    attention_softcap: float | None = None
    logits_softcap: float | None = None
    notes: tuple[str, ...] = ()


class Checkpoint(Protocol):
    """What a model file may ask of a checkpoint while it reads the config."""

    @property
    def settings(self) -> Mapping[str, Any]:
        """The parsed config.json, or a GGUF's metadata with the `<architecture>.` prefix taken off its keys."""

    @property
    def tensor_names(self) -> Collection[str]:
        """Names of all stored tensors."""

    def vector(self, name: str) -> npt.NDArray[np.float32]:
        """A small one-dimensional tensor, for settings that a format keeps as a tensor."""


class Architecture(ABC):
    """One model family: config in, tensor table and plan out.  Stateless."""

    model_type: ClassVar[str]
    causal_lm_class: ClassVar[str]
    gguf_architecture: ClassVar[str | None] = None

    @abstractmethod
    def read_huggingface(self, checkpoint: Checkpoint) -> DecoderConfig:
        """Canonical config from a config.json; raises UnsupportedModelError for a setting it cannot honour."""

    @abstractmethod
    def read_gguf(self, checkpoint: Checkpoint) -> DecoderConfig:
        """Canonical config from GGUF metadata; raises UnsupportedModelError for a setting it cannot honour."""

    @abstractmethod
    def tensors(self, config: DecoderConfig) -> tuple[TensorSpec, ...]:
        """Every tensor of the model.  A checkpoint must hold exactly these."""

    @abstractmethod
    def plan(self, config: DecoderConfig) -> Plan:
        """The model as a list of operations."""
