"""Typed, bounded reading of a checkpoint's settings, and of the spellings that several families share."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from topg.errors import CheckpointError, UnsupportedModelError
from topg.ops import ActivationKind, Rope
from topg.ops.rope import (
    MAX_THETA,
    DynamicScaling,
    FactorScaling,
    LinearScaling,
    Llama3Scaling,
    RopeScaling,
    YarnScaling,
)
from topg.ops.standard import MAX_EPS, MIN_EPS
from topg.wording import shown

MAX_LAYERS = 1024
MAX_WIDTH = 1 << 20
MAX_VOCAB = 1 << 24
MAX_CONTEXT = 1 << 31
MIN_NUMBER, MAX_NUMBER = 1e-6, MAX_THETA  # of any setting that names no range of its own
DEFAULT_WINDOW = 4096
MAX_NOTED = 20  # names of unknown settings in one note

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
        *("unsloth_version", "unsloth_fixed", "transformers.js_config", "_sliding_window_pattern"),
        # of a GGUF file
        *("rope.scaling.finetuned", "rope.scaling.original_context_length", "tensor_data_layout"),
    )
)
INERT_PREFIXES = ("general.", "tokenizer.", "split.", "quantize.", "imatrix.")  # of a GGUF file

# GGUF settings that change the arithmetic, and the values that leave it as it is.  A family that knows one reads it.
GGUF_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "attention.causal": (True,),
    "logit_scale": (0, 1),
    "residual_scale": (0, 1),
    "embedding_scale": (0, 1),
    "attention.output_scale": (0, 1),
    "attention.clamp_kqv": (0,),
    "attention.max_alibi_bias": (0,),
    "attention.sliding_window": (0,),
    "attention.shared_kv_layers": (0,),
    "attention.temperature_length": (0,),
    "attention.temperature_scale": (0,),
    "attn_logit_softcapping": (0,),
    "final_logit_softcapping": (0,),
    "expert_count": (0,),
    "rope.dimension_sections": (),
    "rope.scaling.alpha": (0,),
    "rope.scaling.attn_factor": (0, 1),
    "rope.scaling.yarn_attn_factor": (0, 1),
    "rope.scaling.yarn_ext_factor": (1,),
    "rope.scaling.yarn_log_multiplier": (0,),
}

# The same of a config.json.  The library that wrote it ignores some of these in these families: a file that carries
# one was made for something else.
HUGGINGFACE_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "attn_logit_softcapping": (0,),
    "final_logit_softcapping": (0,),
    "query_pre_attn_scalar": (),
    "embedding_multiplier": (1,),
    "attention_multiplier": (),
    "residual_multiplier": (1,),
    "logits_scaling": (1,),
    "logit_scale": (1,),
    "scale_emb": (1,),
    "scale_depth": (),
    "num_experts": (0,),
    "num_local_experts": (0,),
    "n_routed_experts": (0,),
    "layer_types": ("full_attention",),
    "sliding_window": (0,),
    "no_rope_layers": (1,),
    "rope_interleaved": (False,),
    "clip_qkv": (0,),
    "use_qk_norm": (False,),
    "qk_layernorm": (False,),
    "alibi": (False,),
    "use_bidirectional_attention": (False,),
    "is_causal": (True,),
    "is_encoder_decoder": (False,),
    "text_config": ({},),
    "vision_config": ({},),
    "audio_config": ({},),
}


class Settings:
    """A checkpoint's settings; every getter checks type and range and remembers that the key was read.

    A key with the value null counts as absent; where a family tells the two apart, it asks `is_null`.
    """

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        self._values = values
        self._where = where
        self._read: set[str] = set()

    def get(self, key: str) -> Any:
        """The raw value, or None when absent."""
        self._read.add(key)
        return self._values.get(key)

    def is_null(self, key: str) -> bool:
        """Whether the key is given as null."""
        return key in self._values and self._values[key] is None

    def integer(self, key: str, default: int | None = None, *, minimum: int = 1, maximum: int = MAX_WIDTH) -> int:
        value = self._given(key, default)
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or not minimum <= value <= maximum:
            raise self._error(key, value, f"a whole number from {minimum:,} to {maximum:,}")
        return value

    def number(self, key: str, default: float | None = None, *, minimum: float = MIN_NUMBER,
               maximum: float = MAX_NUMBER) -> float:  # fmt: skip
        value = self._given(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not minimum <= value <= maximum:
            raise self._error(key, value, f"a number from {minimum:g} to {maximum:g}")
        return float(value)

    def epsilon(self, key: str, default: float | None = None) -> float:
        """What a norm adds to the variance."""
        return self.number(key, default, minimum=MIN_EPS, maximum=MAX_EPS)

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
        return UnsupportedModelError(f"{self._where}: {key} is {shown(self._values.get(key))}: {reason}")

    def unread(self) -> tuple[str, ...]:
        """Keys with a value that nothing read and that are not known to be inert."""
        empty: tuple[object, ...] = (None, False, 0, "", [], {})
        return tuple(
            key
            for key, value in self._values.items()
            if key not in self._read and not _is_inert(key) and value not in empty
        )

    def unread_notes(self) -> tuple[str, ...]:
        """The same as a note for the user."""
        keys = self.unread()
        if not keys:
            return ()
        names = ", ".join(map(shown, keys[:MAX_NOTED])) + (", ..." if len(keys) > MAX_NOTED else "")
        return (f"{self._where}: these settings are not known and have no effect: {names}",)

    def refuse_unread(self, neutral: Mapping[str, tuple[Any, ...]]) -> None:
        """Raise UnsupportedModelError for one of these keys that nothing read, unless its value is a neutral one."""
        for key in [key for key in neutral if key not in self._read]:
            if not _is_neutral(self.get(key), neutral[key]):
                raise self.refuse(key, "this architecture has no such setting")

    def _given(self, key: str, default: Any) -> Any:
        value = self.get(key)
        if value is None:
            value = default
        if value is None:
            raise CheckpointError(f"{self._where} has no {shown(key)}, which this architecture needs")
        return value

    def _error(self, key: str, value: object, allowed: str) -> CheckpointError:
        return CheckpointError(f"{self._where}: {key} is {shown(value)}; expected {allowed}")


def _is_inert(key: str) -> bool:
    return key in INERT_KEYS or key.startswith(INERT_PREFIXES)


def _is_neutral(value: Any, neutral: tuple[Any, ...]) -> bool:
    """Whether a value, or each item of a list, is absent or one of the neutral ones."""
    items = value if isinstance(value, list) else [value]
    return all(item is None or any(item == allowed for allowed in neutral) for item in items)


def head_width(hidden: int, heads: int) -> int:
    """Values of a head where nothing else says; raises CheckpointError when the heads do not share the hidden size."""
    if hidden % heads:
        raise CheckpointError(f"a hidden size of {hidden} cannot be shared by {heads} attention heads")
    return hidden // heads


def sliding_window(settings: Settings) -> int | None:
    """The window of sliding layers in tokens: absent it is 4096 in every such family, null or 0 means none."""
    if settings.is_null("sliding_window") or settings.get("sliding_window") == 0:
        return None
    return settings.integer("sliding_window", DEFAULT_WINDOW, maximum=MAX_CONTEXT)


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
    return Rope(dim, theta, huggingface_scaling(scaling, context, original))


def rotary_dim(head_dim: int, share: float) -> int:
    """Rotated values of a head; raises CheckpointError when they do not form pairs."""
    dim = int(head_dim * share)
    if not 2 <= dim <= head_dim or dim % 2:
        raise CheckpointError(
            f"a rotary share of {share} of head_dim {head_dim} gives {dim} values; expected an even number from 2 to "
            f"{head_dim}"
        )
    return dim


def huggingface_scaling(section: Settings, context: int, original: int | None) -> RopeScaling | None:
    """Scaling of a `rope_scaling` or `rope_parameters` section; None for "default"."""
    kind = _rope_kind(section)
    scaling: RopeScaling | None = None
    if kind == "linear":
        scaling = LinearScaling(section.number("factor"))
    elif kind == "dynamic":
        scaling = DynamicScaling(section.number("factor"), context)
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
        raise section.refuse(section.unread()[0], f"rope type {shown(kind)} has no such setting")
    return scaling


def _rope_kind(section: Settings) -> str:
    """The kind of scaling, which older files call `type`."""
    kind, old = section.text("rope_type", ""), section.text("type", "")
    if kind and old and kind != old:
        raise section.refuse("type", f"rope_type is {shown(kind)}; keep one of them")
    return kind or old or "default"


def _yarn(section: Settings, context: int, original: int | None) -> YarnScaling:
    given = original or section.optional_integer("original_max_position_embeddings")
    if given is None and section.get("factor") is None:
        raise section.refuse("factor", "yarn needs its factor, or original_max_position_embeddings")
    length = given or context
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
    scaling = _gguf_scaling(settings, dim, theta, context)
    if factors is None:
        return Rope(dim, theta, scaling)
    if scaling is not None:
        raise settings.refuse("rope.scaling.type", "the file also holds rope_freqs; only one of them is supported")
    return Rope(dim, theta, FactorScaling(tuple(float(factor) for factor in factors)))


def _gguf_scaling(settings: Settings, dim: int, theta: float, context: int) -> RopeScaling | None:
    """Where the kind is absent, a factor means linear scaling; older files call that factor `rope.scale_linear`."""
    kind = settings.text("rope.scaling.type", "linear")
    factor = settings.optional_number("rope.scaling.factor") or settings.optional_number("rope.scale_linear")
    if kind == "linear":
        return None if factor in (None, 1.0) else LinearScaling(settings.number("rope.scaling.factor", factor))
    if kind == "yarn":
        return _gguf_yarn(settings, dim, theta, context)
    if kind != "none":
        raise settings.refuse("rope.scaling.type", "supported: none, linear, yarn")
    return None


def _gguf_yarn(settings: Settings, dim: int, theta: float, context: int) -> YarnScaling:
    scaling = YarnScaling(
        settings.number("rope.scaling.factor"),
        settings.integer("rope.scaling.original_context_length", context, maximum=MAX_CONTEXT),
        beta_fast=settings.number("rope.scaling.yarn_beta_fast", 32.0),
        beta_slow=settings.number("rope.scaling.yarn_beta_slow", 1.0),
    )
    # in this format the factor multiplies the one the paper suggests, elsewhere it replaces it
    extra = settings.number("rope.scaling.attn_factor", 1.0)
    return replace(scaling, attention_factor=extra * Rope(dim, theta, scaling).attention_factor)
