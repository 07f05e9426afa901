"""The manifest of a converted model: everything about it except the weights, as one JSON file.

Unknown keys, wrong types and newer versions are refused: a manifest means one thing or it is an error.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from topg import ops
from topg.converter.checks import check_special_tokens
from topg.converter.strict_json import parse
from topg.errors import CheckpointError, PrecisionError, RequestError
from topg.models import supported
from topg.models.settings import MAX_CONTEXT
from topg.plan import Plan
from topg.precision.formats import Precision
from topg.precision.quantise import check_quantisable
from topg.precision.recipes import RECIPE_NAMES, Role
from topg.sampling_params import SamplingParams
from topg.tokenizer.special import SpecialTokens
from topg.wording import shown

FORMAT_NAME = "topg"
FORMAT_VERSION = 1
MANIFEST_FILE = "manifest.json"
TOKENIZER_FILE = "tokenizer.json"
MAX_DIMENSION = 2**40

_WEIGHT_FILE = re.compile(r"model-\d{5}\.safetensors")
_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class TensorRecord:
    """A tensor of the converted model: its logical shape, what it is for, its layer (None: outside the layers)."""

    shape: tuple[int, ...]
    role: Role
    layer: int | None
    precision: Precision


@dataclass(frozen=True)
class GenerationDefaults:
    """Sampling values the model's publisher recommends; None where the source names none.

    Raises CheckpointError for a value that `SamplingParams` does not allow.
    """

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    repetition_penalty: float | None = None
    min_p: float | None = None

    def __post_init__(self) -> None:
        try:
            SamplingParams(**self.given)
        except RequestError as error:
            raise CheckpointError(f"recommended sampling values: {error}") from error

    @property
    def given(self) -> dict[str, Any]:
        """The values that the source names."""
        return {name: value for name, value in asdict(self).items() if value is not None}


@dataclass(frozen=True)
class SourceRecord:
    """What the model was converted from: the name it was asked for by, and the SHA-256 of each file read."""

    name: str
    files: Mapping[str, str]


@dataclass(frozen=True)
class Manifest:
    """One converted model.

    `architecture` is the Hugging Face model_type, `context` the longest sequence in tokens, `files` the SHA-256 of
    every other file of the folder.
    """

    format_version: int
    topg_version: str
    name: str
    architecture: str
    context: int
    recipe: str
    plan: Plan
    tensors: Mapping[str, TensorRecord]
    tokens: SpecialTokens
    chat_template: str | None
    generation: GenerationDefaults
    source: SourceRecord
    files: Mapping[str, str]

    @property
    def weight_files(self) -> tuple[str, ...]:
        """Names of the files that hold weights, in order."""
        return tuple(sorted(name for name in self.files if name != TOKENIZER_FILE))

    @property
    def nbytes(self) -> int:
        """Bytes of all weights as stored."""
        return sum(record.precision.nbytes(record.shape) for record in self.tensors.values())

    def to_json(self) -> dict[str, Any]:
        """Plain data; `from_json` gives an equal manifest back."""
        fields = {name: getattr(self, name) for name in _PLAIN_FIELDS}
        return {"format": FORMAT_NAME} | fields | {
            "source": asdict(self.source),
            "generation": asdict(self.generation),
            "tokens": self.tokens.to_json(),
            "files": dict(self.files),
            "tensors": {name: asdict(record) for name, record in self.tensors.items()},
            "plan": self.plan.to_json(),
        }  # fmt: skip

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Manifest:
        """Check and rebuild; raises CheckpointError naming the key at fault."""
        _check_version(data)
        body = parse(_ManifestBody, {key: value for key, value in data.items() if key != "format"}, MANIFEST_FILE)
        _check_files(body.files)
        _check_names(body)
        for name, record in body.tensors.items():
            _check_record(name, record)
        plan, tokens = _plan_from_json(body.plan), SpecialTokens.from_json(body.tokens)
        _check_embedding(plan)
        check_special_tokens(tokens, plan.vocab)
        return cls(
            **{name: getattr(body, name) for name in _PLAIN_FIELDS},
            plan=plan,
            tensors=body.tensors,
            tokens=tokens,
            generation=body.generation,
            source=body.source,
            files=body.files,
        )


@dataclass(frozen=True)
class _ManifestBody:
    """The manifest as JSON holds it: what `parse` checks before the richer parts are built."""

    format_version: int
    topg_version: str
    name: str
    architecture: str
    context: int
    recipe: str
    chat_template: str | None
    source: SourceRecord
    generation: GenerationDefaults
    tokens: Mapping[str, Any]
    files: Mapping[str, str]
    tensors: Mapping[str, TensorRecord]
    plan: tuple[Mapping[str, Any], ...]


_PLAIN_FIELDS = ("format_version", "topg_version", "name", "architecture", "context", "recipe", "chat_template")


def is_own_file(name: str) -> bool:
    """Whether a converted model's folder may hold a file of this name."""
    return name in (MANIFEST_FILE, TOKENIZER_FILE) or _WEIGHT_FILE.fullmatch(name) is not None


def _check_version(data: Mapping[str, Any]) -> None:
    if data.get("format") != FORMAT_NAME:
        raise CheckpointError(f"{MANIFEST_FILE}.format must be {FORMAT_NAME!r}: it does not describe a converted model")
    version = data.get("format_version")
    if type(version) is not int or version < 1:
        raise CheckpointError(f"{MANIFEST_FILE}.format_version must be a positive integer, not {shown(version)}")
    if version > FORMAT_VERSION:
        raise CheckpointError(
            f"the model was converted by a newer ToPG ({data.get('topg_version')!s:.40}, format {version}); this one"
            f" reads format {FORMAT_VERSION}: update ToPG, or convert the model again"
        )


def _check_names(body: _ManifestBody) -> None:
    """Family, recipe and context are ones that a conversion gives."""
    for key, value, known in (
        ("architecture", body.architecture, supported()),
        ("recipe", body.recipe, RECIPE_NAMES),
    ):
        if value not in known:
            raise CheckpointError(f"{MANIFEST_FILE}.{key} must be one of {', '.join(known)}, not {shown(value)}")
    if not 1 <= body.context <= MAX_CONTEXT:
        raise CheckpointError(f"{MANIFEST_FILE}.context must be 1 to {MAX_CONTEXT:,} tokens, not {body.context}")


def _check_files(files: Mapping[str, str]) -> None:
    """Only the names this format gives: nothing a manifest says can point outside its folder."""
    for name, digest in files.items():
        if name == MANIFEST_FILE or not is_own_file(name):
            raise CheckpointError(
                f"{MANIFEST_FILE}.files names {shown(name)}; files are {TOKENIZER_FILE} and model-00001.safetensors .."
            )
        if not _SHA256.fullmatch(digest):
            raise CheckpointError(
                f"{MANIFEST_FILE}.files[{shown(name)}] must be 64 hexadecimal digits, not {shown(digest)}"
            )
    if TOKENIZER_FILE not in files or len(files) < 2:
        raise CheckpointError(f"{MANIFEST_FILE}.files must name {TOKENIZER_FILE} and at least one file of weights")


def _check_record(name: str, record: TensorRecord) -> None:
    key = f"{MANIFEST_FILE}.tensors[{shown(name)}]"
    if not 1 <= len(record.shape) <= 2 or not all(1 <= dim <= MAX_DIMENSION for dim in record.shape):
        raise CheckpointError(f"{key}.shape must be 1 or 2 sizes from 1 to {MAX_DIMENSION}, not {list(record.shape)}")
    try:
        check_quantisable(record.precision, record.shape)
    except PrecisionError as error:
        raise CheckpointError(f"{key}.precision: {error}") from error


def _check_embedding(plan: Plan) -> None:
    """Every token that the logits can name is a row of the embedding."""
    for op in plan.ops:
        if isinstance(op, ops.Embed) and op.vocab != plan.vocab:
            raise CheckpointError(
                f"{MANIFEST_FILE}.plan: embed {shown(op.name)} has {op.vocab} rows, the logits {plan.vocab} columns"
            )


def _plan_from_json(data: Iterable[Mapping[str, Any]]) -> Plan:
    """Types first, by the fields of each op; then the plan's own rules (buffers, widths, order)."""
    items = [dict(item) for item in data]
    for index, item in enumerate(items):
        key = f"{MANIFEST_FILE}.plan[{index}]"
        attributes = {name: value for name, value in item.items() if name != "op"}
        parse(ops.op_class(parse(str, item.get("op"), f"{key}.op")), attributes, key)
    return Plan.from_json(items)
