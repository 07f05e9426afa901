"""What must agree before a model is written or used: sizes, tensors, shapes, rows, token ids.

Each check raises an error that names what it found, what it expected, and where.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Protocol

import numpy as np

from topg.converter.wording import listed
from topg.errors import CheckpointError
from topg.models.base import DecoderConfig, Source, TensorSpec
from topg.models.settings import MAX_CONTEXT, MAX_LAYERS, MAX_VOCAB, MAX_WIDTH
from topg.plan import Plan
from topg.tokenizer.special import SpecialTokens
from topg.wording import shown

TensorShapes = Mapping[str, tuple[int, ...]]
SourcedSpec = tuple[TensorSpec, Source]


class StoredShapes(Protocol):
    """What the tensor checks ask of a checkpoint."""

    @property
    def tensor_names(self) -> Collection[str]:
        """Names of all stored tensors."""

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a stored tensor."""


def check_config(config: DecoderConfig, stored_tensors: int) -> None:
    """Sizes are within reason, so that nothing built from them takes more memory than the checkpoint justifies."""
    limits = (
        ("layers", config.layers, MAX_LAYERS),
        ("hidden size", config.hidden, MAX_WIDTH),
        ("intermediate size", config.intermediate, MAX_WIDTH),
        ("attention heads times head size", config.heads * config.head_dim, MAX_WIDTH),
        ("key/value heads times head size", config.kv_heads * config.head_dim, MAX_WIDTH),
        ("vocabulary size", config.vocab, MAX_VOCAB),
        ("context length", config.context, MAX_CONTEXT),
    )
    for what, value, limit in limits:
        if not 1 <= value <= limit:
            raise CheckpointError(f"the checkpoint's config gives {value} as {what}; expected 1 to {limit}")
    if config.layers > stored_tensors:
        raise CheckpointError(
            f"the checkpoint's config gives {config.layers} layers, but only {stored_tensors} tensors are stored"
        )


def check_tensors(uses: Iterable[SourcedSpec], stored: StoredShapes) -> None:
    """Every tensor the model needs is stored, in the shape it needs, and its rows are used exactly once each."""
    by_source: dict[str, list[SourcedSpec]] = {}
    for spec, source in uses:
        by_source.setdefault(source.name, []).append((spec, source))
    _check_none_missing(by_source, stored.tensor_names)
    for name, users in by_source.items():
        for spec, source in users:
            _check_shape(name, spec.stored_shape(source), stored.shape(name))
        _check_rows_covered(name, users, stored.shape(name)[0])


def check_none_unused(used: Collection[str], ignored: Collection[str], stored_names: Collection[str]) -> None:
    """No stored tensor is left over; `ignored` are those that are known to hold nothing the model needs."""
    unused = sorted(set(stored_names) - set(used) - set(ignored))
    if unused:
        raise CheckpointError(
            f"the checkpoint holds {len(unused)} tensor(s) that its architecture does not use: {listed(unused)};"
            " its settings do not describe them, or the model is a variant that ToPG does not know"
        )


def check_vocabulary(token_count: int, embedding_rows: int) -> None:
    """Every token of the tokenizer has an embedding; the embedding may have spare rows."""
    if token_count > embedding_rows:
        raise CheckpointError(
            f"the tokenizer has {token_count} tokens, but the model has only {embedding_rows} embedding rows;"
            " the tokenizer belongs to another model"
        )


def check_special_tokens(tokens: SpecialTokens, embedding_rows: int) -> None:
    """Every special token is a row of the embedding."""
    ids: Sequence[tuple[str, int | None]] = (
        ("bos", tokens.bos),
        ("pad", tokens.pad),
        ("unk", tokens.unk),
        *(("eos", token) for token in tokens.eos),
        *(("chat marker", token) for token in tokens.chat_markers),
    )
    for what, token in ids:
        if token is not None and not 0 <= token < embedding_rows:
            raise CheckpointError(f"the {what} token is {token}; ids of this model are 0 to {embedding_rows - 1}")


def check_tensors_fit_plan(plan: Plan, shapes: TensorShapes) -> None:
    """The tensors are exactly those the plan uses, in the shapes its ops expect."""
    names = set(plan.tensor_names)
    if names - shapes.keys():
        raise CheckpointError(f"the plan uses tensors that do not exist: {listed(sorted(names - shapes.keys()))}")
    if shapes.keys() - names:
        raise CheckpointError(f"the plan does not use these tensors: {listed(sorted(shapes.keys() - names))}")
    for op in plan.ops:
        for name, expected in op.tensor_shapes().items():
            _check_shape(f"{name} (used by {op.kind} {shown(op.name)})", expected, shapes[name])


def _check_none_missing(needed: Mapping[str, Sequence[SourcedSpec]], stored: Collection[str]) -> None:
    missing = sorted(set(needed) - set(stored))
    if missing:
        raise CheckpointError(f"the checkpoint lacks {len(missing)} tensor(s) its config asks for: {listed(missing)}")


def _check_shape(name: str, expected: tuple[int, ...], found: tuple[int, ...]) -> None:
    if found != expected:
        raise CheckpointError(f"tensor {name} has shape {list(found)}; expected {list(expected)}")


def _check_rows_covered(name: str, users: Sequence[SourcedSpec], stored_rows: int) -> None:
    """A fused tensor must be used up by its parts: a row used twice or not at all means a wrong layout."""
    counts = np.zeros(stored_rows, dtype=np.int64)
    for _, source in users:
        np.add.at(counts, np.arange(stored_rows) if source.rows is None else source.rows, 1)
    if not (counts == 1).all():
        row = int(np.flatnonzero(counts != 1)[0])
        raise CheckpointError(f"row {row} of tensor {name} would be used {counts[row]} times; expected once")
