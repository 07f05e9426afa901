"""What a conversion will write, decided and checked in full before the first byte is written."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

import numpy as np
import numpy.typing as npt

from topg.converter.checks import (
    SourcedSpec,
    check_config,
    check_none_unused,
    check_tensors,
    check_tensors_fit_plan,
)
from topg.converter.source import CheckpointSource
from topg.converter.strict_json import parse
from topg.converter.weights import TensorJob, same_values
from topg.converter.wording import listed
from topg.errors import CheckpointError, PrecisionError
from topg.models import architecture_for_gguf, architecture_for_huggingface
from topg.models.base import Architecture, DecoderConfig, Source, TensorSpec
from topg.plan import Plan
from topg.precision.formats import BFLOAT16, FLOAT16, FLOAT32, Precision
from topg.precision.gguf_blocks import kept_precision
from topg.precision.recipes import KEEP, VECTOR_ROLES, recipe

# Buffers that older checkpoints saved along with the weights: tables and masks that follow from the config.
HARMLESS_BUFFERS = ("*.rotary_emb.inv_freq", "*.attention.bias", "*.attention.masked_bias")
FLOAT_TYPES: Mapping[str, Precision] = {"float32": FLOAT32, "float16": FLOAT16, "bfloat16": BFLOAT16}


@dataclass(frozen=True)
class Blueprint:
    """A checked conversion: the model in canonical terms, and a job for each of its tensors in the plan's order."""

    architecture: Architecture
    config: DecoderConfig
    plan: Plan
    jobs: tuple[TensorJob, ...]
    warnings: tuple[str, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of all weights as they will be stored."""
        return sum(job.nbytes for job in self.jobs)


def draw_blueprint(checkpoint: CheckpointSource, recipe_name: str) -> Blueprint:
    """Read the config and settle every tensor's source and precision.

    Raises CheckpointError when tensors and config do not agree, UnsupportedModelError for an unknown architecture,
    setting or tensor type, PrecisionError when the recipe is unknown or cannot be met.
    """
    architecture = _architecture(checkpoint)
    record = _SettingsRecord(checkpoint)
    config = _read_config(architecture, record)
    check_config(config, len(checkpoint.tensor_names))
    # One layer first: the whole table of a forged config could take more memory than its file justifies.
    check_tensors(_sourced(architecture, replace(config, layers=1, tied=True), checkpoint), checkpoint)
    config, same_as_embedding, head_warnings = _settle_head(architecture, config, checkpoint)

    table = _sourced(architecture, config, checkpoint)
    check_tensors(table, checkpoint)
    used = {source.name for _, source in table} | record.vectors_read | set(same_as_embedding)
    buffers = _harmless_buffers(set(checkpoint.tensor_names) - used)
    check_none_unused(used, buffers, checkpoint.tensor_names)

    plan = architecture.plan(config)
    check_tensors_fit_plan(plan, {spec.name: spec.shape for spec, _ in table})
    jobs = _jobs(plan, table, checkpoint, recipe_name)
    for job in jobs:
        if job.kept_type is None:
            checkpoint.check_type(job.source.name)
    warnings = (*config.notes, *head_warnings, *_buffer_warning(buffers))
    return Blueprint(architecture, config, plan, jobs, warnings)


class _SettingsRecord:
    """The checkpoint as a model file sees it; remembers which tensors were read as settings."""

    def __init__(self, checkpoint: CheckpointSource) -> None:
        self._checkpoint = checkpoint
        self.vectors_read: set[str] = set()

    @property
    def kind(self) -> str:
        return self._checkpoint.kind

    @property
    def settings(self) -> Mapping[str, Any]:
        return self._checkpoint.settings

    @property
    def tensor_names(self) -> Collection[str]:
        return self._checkpoint.tensor_names

    def vector(self, name: str) -> npt.NDArray[np.float32]:
        self.vectors_read.add(name)
        return self._checkpoint.vector(name)


def _architecture(checkpoint: CheckpointSource) -> Architecture:
    if checkpoint.kind == "gguf":
        return architecture_for_gguf(checkpoint.architecture_name)
    classes = parse(tuple[str, ...], checkpoint.settings.get("architectures") or [], "config.json: architectures")
    return architecture_for_huggingface(checkpoint.architecture_name, list(classes))


def _read_config(architecture: Architecture, record: _SettingsRecord) -> DecoderConfig:
    read = architecture.read_gguf if record.kind == "gguf" else architecture.read_huggingface
    return read(record)


def _sourced(architecture: Architecture, config: DecoderConfig, checkpoint: CheckpointSource) -> list[SourcedSpec]:
    """The model's tensors, each with its place in this kind of checkpoint."""
    return [(spec, _source(spec, checkpoint)) for spec in architecture.tensors(config)]


def _source(spec: TensorSpec, checkpoint: CheckpointSource) -> Source:
    return spec.gguf if checkpoint.kind == "gguf" else spec.huggingface


def _settle_head(
    architecture: Architecture, config: DecoderConfig, checkpoint: CheckpointSource
) -> tuple[DecoderConfig, tuple[str, ...], tuple[str, ...]]:
    """Whether the head is the embedding: by the config, and by what is stored.

    Returns the config, the stored head if it merely repeats the embedding, and warnings.
    """
    table = {spec.role: source for spec, source in _sourced(architecture, _untied_layer(config), checkpoint)}
    head, embedding = table["head"].name, table["embedding"].name
    stored = head in checkpoint.tensor_names
    if not config.tied and not stored:
        raise CheckpointError(
            f"the checkpoint holds no head ({head}) and its config does not tie it to the embedding; if the model ties"
            ' them, set "tie_word_embeddings": true in config.json, otherwise fetch the missing weights'
        )
    if not config.tied or not stored:
        return config, (), ()
    if same_values(checkpoint, head, embedding):
        return config, (head,), ()
    warning = f"the config ties the head to the embedding, but {head} differs from {embedding}: the stored head is used"
    return replace(config, tied=False), (), (warning,)


def _untied_layer(config: DecoderConfig) -> DecoderConfig:
    return replace(config, layers=1, tied=False)


def _harmless_buffers(names: Collection[str]) -> list[str]:
    return sorted(name for name in names if any(fnmatchcase(name, pattern) for pattern in HARMLESS_BUFFERS))


def _buffer_warning(buffers: Sequence[str]) -> tuple[str, ...]:
    if not buffers:
        return ()
    return (f"{len(buffers)} stored buffer(s) are left out, since the config says what they hold: {listed(buffers)}",)


def _jobs(
    plan: Plan, table: Sequence[SourcedSpec], checkpoint: CheckpointSource, recipe_name: str
) -> tuple[TensorJob, ...]:
    by_name = {spec.name: (spec, source) for spec, source in table}
    ordered = [by_name[name] for name in plan.tensor_names]
    if recipe_name == KEEP:
        return tuple(_kept_job(spec, source, checkpoint) for spec, source in ordered)
    chosen = recipe(recipe_name)
    return tuple(TensorJob(spec, source, chosen.precision(spec.role)) for spec, source in ordered)


def _kept_job(spec: TensorSpec, source: Source, checkpoint: CheckpointSource) -> TensorJob:
    """Vectors become float32 as under every recipe; the rest keeps what the checkpoint holds, bit for bit."""
    if spec.role in VECTOR_ROLES:
        return TensorJob(spec, source, FLOAT32)
    type_name = checkpoint.type_name(source.name)
    precision = FLOAT_TYPES.get(type_name) or kept_precision(type_name)
    if precision is None:
        raise PrecisionError(
            f"tensor {source.name} has type {type_name}, which cannot be kept as it is; choose another recipe"
        )
    if not precision.grouped:
        return TensorJob(spec, source, precision)
    if source.offset:
        raise PrecisionError(
            f"tensor {source.name} cannot be kept as {type_name}, since {source.offset} is added to its values"
        )
    return TensorJob(spec, source, precision, kept_type=type_name)
