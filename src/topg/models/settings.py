"""Typed, bounded reading of a checkpoint's settings, and of the spellings that several families share."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from topg.errors import CheckpointError, UnsupportedModelError
from topg.ops import ActivationKind, Rope
from topg.ops.rope import (
    DynamicScaling,
    FactorScaling,
    LinearScaling,
    Llama3Scaling,
    RopeScaling,
    YarnScaling,
)

MAX_LAYERS = 1024
MAX_WIDTH = 1 << 20
MAX_VOCAB = 1 << 24
MAX_CONTEXT = 1 << 31

ACTIVATION_NAMES: Mapping[str, ActivationKind] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
}

# Keys that say how a model was made, stored or trained, or that other parts of ToPG read: they change no arithmetic.
INERT_KEYS = frozenset(
    (
        *("architectures", "model_type", "torch_dtype", "dtype", "transformers_version", "_name_or_path"),
        *("use_cache", "initializer_range", "attention_dropout", "hidden_dropout", "classifier_dropout"),
        *("embd_pdrop", "resid_pdrop", "pretraining_tp", "vocab_size", "auto_map", "quantization_config"),
        *("bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id", "id2label", "label2id", "problem_type"),
        *("_attn_implementation", "_attn_implementation_autoset", "cache_implementation", "tokenizer_class"),
        *("return_dict", "output_hidden_states", "output_attentions", "is_llama_config", "is_decoder"),
        *("rope_interleaved", "unsloth_version", "unsloth_fixed", "transformers.js_config"),
    )
)


class Settings:
    """A checkpoint's settings; every getter checks type and range and remembers that the key was read.

    A key with the value null counts as absent, as in every published config.
    """

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        self._values = values
        self._where = where
        self._read: set[str] = set()

    def get(self, key: str) -> Any:
        """The raw value, or None when absent."""
        self._read.add(key)
        return self._values.get(key)

    def integer(self, key: str, default: int | None = None, *, minimum: int = 1, maximum: int = MAX_WIDTH) -> int:
        value = self._given(key, default)
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or not minimum <= value <= maximum:
            raise self._error(key, value, f"a whole number from {minimum:,} to {maximum:,}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self._given(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value <= 0:
            raise self._error(key, value, "a positive number")
        return float(value)

    def optional_number(self, key: str) -> float | None:
        """A positive number, or None when absent or zero."""
        return None if self.get(key) in (None, 0) else self.number(key)

    def optional_integer(self, key: str, *, maximum: int = MAX_CONTEXT) -> int | None:
        """A positive whole number, or None when absent or zero."""
        return None if self.get(key) in (None, 0) else self.integer(key, maximum=maximum)

    def flag(self, key: str, default: bool) -> bool:
        value = self._given(key, default)
        if not isinstance(value, bool):
            raise self._error(key, value, "true or false")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        value = self._given(key, default)
        if not isinstance(value, str):
            raise self._error(key, value, "a string")
        return value

    def section(self, key: str) -> Settings | None:
        """A nested object, or None when absent."""
        value = self.get(key)
        if value is None:
            return None
        if not isinstance(value, Mapping):
            raise self._error(key, value, "an object")
        return Settings(value, f"{self._where}: {key}")

    def refuse(self, key: str, reason: str) -> UnsupportedModelError:
        """The error to raise for a setting that is understood but cannot be honoured."""
        return UnsupportedModelError(f"{self._where}: {key} is {self._values.get(key)!r}: {reason}")

    def unread(self) -> tuple[str, ...]:
        """Keys with a value that nothing read and that are not known to be inert."""
        empty: tuple[object, ...] = (None, False, 0, "", [], {})
        return tuple(
            key
            for key, value in self._values.items()
            if key not in self._read and key not in INERT_KEYS and value not in empty
        )

    def unread_notes(self) -> tuple[str, ...]:
        """The same as a note for the user."""
        keys = self.unread()
        return (f"{self._where}: these settings are not known and have no effect: {', '.join(keys)}",) if keys else ()

    def _given(self, key: str, default: Any) -> Any:
        value = self.get(key)
        if value is None:
            value = default
        if value is None:
            raise CheckpointError(f"{self._where} has no {key!r}, which this architecture needs")
        return value

    def _error(self, key: str, value: object, allowed: str) -> CheckpointError:
        shown = repr(value) if len(repr(value)) <= 60 else f"{repr(value)[:60]}..."
        return CheckpointError(f"{self._where}: {key} is {shown}; expected {allowed}")


def activation(settings: Settings, key: str, default: str) -> ActivationKind:
    """The activation function a config names."""
    name = settings.text(key, default)
    if name not in ACTIVATION_NAMES:
        raise settings.refuse(key, f"supported activations: {', '.join(ACTIVATION_NAMES)}")
    return ACTIVATION_NAMES[name]


def huggingface_rope(settings: Settings, head_dim: int, context: int, *, rotary_share: float = 1.0,
                     theta_key: str = "rope_theta", default_theta: float = 10000.0) -> Rope:  # fmt: skip
    """Rope of a config.json in any spelling.

    `rope_parameters` holds everything at once; before it there were `rope_theta` and `rope_scaling`, whose kind stands
    under `rope_type` or `type`.
    """
    share = settings.number("partial_rotary_factor", rotary_share)
    sections = [section for key in ("rope_parameters", "rope_scaling") if (section := settings.section(key))]
    if len(sections) == 2:
        raise settings.refuse("rope_scaling", "rope_parameters is given as well; keep one of them")
    scaling = sections[0] if sections else Settings({}, "rope")
    theta = scaling.number("rope_theta", settings.number(theta_key, default_theta))
    share = scaling.number("partial_rotary_factor", share)
    original = settings.optional_integer("original_max_position_embeddings")
    dim = rotary_dim(head_dim, share)
    return Rope(dim, theta, huggingface_scaling(scaling, context, original, dim))


def rotary_dim(head_dim: int, share: float) -> int:
    """Rotated values of a head; raises CheckpointError when they do not form pairs."""
    dim = int(head_dim * share)
    if not 2 <= dim <= head_dim or dim % 2:
        raise CheckpointError(
            f"a rotary share of {share} of head_dim {head_dim} gives {dim} values; expected an even number from 2 to "
            f"{head_dim}"
        )
    return dim


def huggingface_scaling(section: Settings, context: int, original: int | None, dim: int) -> RopeScaling | None:
    """Scaling of a `rope_scaling` or `rope_parameters` section; None for "default"."""
    kind = section.get("rope_type") or section.get("type") or "default"
    section.get("type")
    scaling: RopeScaling | None = None
    if kind == "linear":
        scaling = LinearScaling(section.number("factor"))
    elif kind == "dynamic":
        scaling = _dynamic(section, context, dim)
    elif kind == "llama3":
        scaling = Llama3Scaling(
            section.number("factor"),
            section.number("low_freq_factor"),
            section.number("high_freq_factor"),
            original or section.integer("original_max_position_embeddings", context, maximum=MAX_CONTEXT),
        )
    elif kind == "yarn":
        scaling = _yarn(section, context, original)
    elif kind != "default":
        raise section.refuse(
            "rope_type" if section.get("rope_type") else "type",
            "supported rope types: default, linear, dynamic, llama3, yarn",
        )
    section.get("original_max_position_embeddings")
    if section.unread():
        raise section.refuse(section.unread()[0], f"rope type {kind!r} has no such setting")
    return scaling


def _dynamic(section: Settings, context: int, dim: int) -> DynamicScaling:
    if dim <= 2:
        raise section.refuse("rope_type", "dynamic scaling needs more than 2 rotated values per head")
    return DynamicScaling(section.number("factor"), context)


def _yarn(section: Settings, context: int, original: int | None) -> YarnScaling:
    length = original or section.integer("original_max_position_embeddings", context, maximum=MAX_CONTEXT)
    return YarnScaling(
        factor=section.number("factor", context / length),
        original_length=length,
        beta_fast=section.number("beta_fast", 32.0),
        beta_slow=section.number("beta_slow", 1.0),
        attention_factor=section.optional_number("attention_factor"),
        mscale=section.optional_number("mscale"),
        mscale_all_dim=section.optional_number("mscale_all_dim"),
        truncate=section.flag("truncate", True),
    )


def gguf_rope(settings: Settings, head_dim: int, factors: Iterable[float] | None = None, *, context: int,
              default_theta: float = 10000.0) -> Rope:  # fmt: skip
    """Rope of GGUF metadata; `factors` is its `rope_freqs` tensor where it has one."""
    dim = settings.integer("rope.dimension_count", head_dim, maximum=head_dim)
    theta = settings.number("rope.freq_base", default_theta)
    kind = settings.text("rope.scaling.type", "none")
    scaling: RopeScaling | None = None
    if factors is not None:
        scaling = FactorScaling(tuple(float(factor) for factor in factors))
        if len(scaling.factors) != dim // 2:
            raise CheckpointError(f"rope_freqs holds {len(scaling.factors)} factors; expected {dim // 2}")
    if kind == "linear":
        if scaling is not None:
            raise settings.refuse("rope.scaling.type", "the file also holds rope_freqs; only one of them is supported")
        scaling = LinearScaling(settings.number("rope.scaling.factor"))
    elif kind == "yarn":
        original = settings.integer("rope.scaling.original_context_length", context, maximum=MAX_CONTEXT)
        scaling = YarnScaling(
            settings.number("rope.scaling.factor"),
            original,
            beta_fast=settings.number("rope.scaling.yarn_beta_fast", 32.0),
            beta_slow=settings.number("rope.scaling.yarn_beta_slow", 1.0),
        )
        # in this format the factor multiplies the one the paper suggests, elsewhere it replaces it
        extra = settings.number("rope.scaling.attn_factor", 1.0)
        scaling = replace(scaling, attention_factor=extra * Rope(dim, theta, scaling).attention_factor)
    elif kind != "none":
        raise settings.refuse("rope.scaling.type", "supported: none, linear, yarn")
    return Rope(dim, theta, scaling)
