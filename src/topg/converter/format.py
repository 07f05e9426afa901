"""The converted model on disk: a folder with a manifest, the tokenizer and the weights, ready to be mapped.

    manifest.json               everything but the weights (see `manifest`)
    tokenizer.json              the Hugging Face tokenizers file
    model-00001.safetensors ..  the parts of every tensor, named "<tensor>.<part>", in the plan's order of first use

Opening checks everything except the weights' contents: names, types, shapes and sizes of all parts, the tensor set
against the plan, and the tokenizer's hash.  `verify` hashes the weights too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from topg.converter.checks import check_tensors_fit_plan
from topg.converter.manifest import MANIFEST_FILE, TOKENIZER_FILE, Manifest
from topg.converter.safetensors_file import AnyArray, SafetensorsFile
from topg.converter.strict_json import read_object
from topg.errors import CheckpointError, ModelNotFoundError
from topg.files import sha256_of
from topg.plan import Plan
from topg.precision.formats import Part, Precision
from topg.tokenizer.tokenizer import Tokenizer
from topg.wording import shown

MAX_MANIFEST_BYTES = 16 << 20


class ConvertedModel:
    """A converted model, opened for reading.  Weights are memory-mapped: they cost memory only once they are used."""

    def __init__(self, folder: Path, manifest: Manifest, parts: Mapping[str, SafetensorsFile]) -> None:
        """Use `open`, which checks what it is given."""
        self.folder = folder
        self.manifest = manifest
        self._parts = parts

    @classmethod
    def open(cls, path: str | Path) -> ConvertedModel:
        """Open and check a converted model; raises ModelNotFoundError or CheckpointError saying what is wrong."""
        folder = Path(path)
        manifest = read_manifest(folder)
        _check_hash(folder, TOKENIZER_FILE, manifest)
        check_tensors_fit_plan(manifest.plan, {name: record.shape for name, record in manifest.tensors.items()})
        parts = _open_weights(folder, manifest)
        _check_parts(parts, manifest)
        return cls(folder, manifest, parts)

    @property
    def plan(self) -> Plan:
        """The model as a list of operations."""
        return self.manifest.plan

    @property
    def tokenizer_file(self) -> Path:
        """The Hugging Face tokenizers file."""
        return self.folder / TOKENIZER_FILE

    def load_tokenizer(self) -> Tokenizer:
        """A tokenizer with the model's special tokens and chat template."""
        text = self.tokenizer_file.read_text(encoding="utf-8")
        return Tokenizer(text, self.manifest.tokens, self.manifest.chat_template)

    def precision(self, tensor: str) -> Precision:
        """How a tensor is stored and multiplied."""
        return self.manifest.tensors[tensor].precision

    def shape(self, tensor: str) -> tuple[int, ...]:
        """Logical shape of a tensor, before grouping and padding."""
        return self.manifest.tensors[tensor].shape

    def part(self, tensor: str, part: str) -> AnyArray:
        """One stored array of a tensor (see `Precision.parts`), read-only and mapped; bfloat16 comes as uint16 bits.

        Valid as long as this object lives.
        """
        name = part_name(tensor, part)
        return self._parts[name].array(name)

    def parts(self, tensor: str) -> dict[str, AnyArray]:
        """All stored arrays of a tensor by part name."""
        return {part: self.part(tensor, part) for part in self.precision(tensor).parts(self.shape(tensor))}

    def release_memory(self) -> None:
        """Let go of the memory that mapped parts take; they stay valid."""
        for file in set(self._parts.values()):
            file.release_memory()

    def verify(self) -> None:
        """Hash every file; raises CheckpointError naming the first whose contents are not what was converted."""
        for name in self.manifest.files:
            _check_hash(self.folder, name, self.manifest)


def is_converted(path: str | Path) -> bool:
    """Whether a folder claims to be a converted model."""
    return (Path(path) / MANIFEST_FILE).is_file()


def read_manifest(folder: Path) -> Manifest:
    """The checked manifest of a converted model, without looking at its weights."""
    if not folder.is_dir():
        raise ModelNotFoundError(f"no converted model at {folder}: there is no such folder; make one with topg convert")
    if not is_converted(folder):
        raise ModelNotFoundError(f"{folder} is not a converted model: no {MANIFEST_FILE}; make one with topg convert")
    return Manifest.from_json(read_object(folder / MANIFEST_FILE, MAX_MANIFEST_BYTES))


def part_name(tensor: str, part: str) -> str:
    """The name a part is stored under."""
    return f"{tensor}.{part}"


def stored_parts(manifest: Manifest) -> Iterator[tuple[str, Part]]:
    """Name, type and shape of every stored array, in the order they are stored."""
    for tensor in manifest.plan.tensor_names:
        record = manifest.tensors[tensor]
        for part, stored in record.precision.parts(record.shape).items():
            yield part_name(tensor, part), stored


def _open_weights(folder: Path, manifest: Manifest) -> dict[str, SafetensorsFile]:
    """The file of every stored part."""
    parts: dict[str, SafetensorsFile] = {}
    for name in manifest.weight_files:
        _require_file(folder / name)
        file = SafetensorsFile(folder / name)
        repeated = parts.keys() & set(file.tensor_names)
        if repeated:
            raise CheckpointError(f"{folder}: part {shown(min(repeated))} is stored twice, the second time in {name}")
        parts |= dict.fromkeys(file.tensor_names, file)
    return parts


def _check_parts(parts: Mapping[str, SafetensorsFile], manifest: Manifest) -> None:
    """Every part of every tensor is stored with the right type and shape, and nothing else is."""
    expected = dict(stored_parts(manifest))
    for name, part in expected.items():
        if name not in parts:
            raise CheckpointError(f"part {shown(name)} of the converted model is missing; convert the model again")
        file = parts[name]
        if (file.dtype(name), file.shape(name)) != (part.dtype, part.shape):
            raise CheckpointError(
                f"{file.path}: part {shown(name)} is {file.dtype(name)} {list(file.shape(name))};"
                f" the manifest says {part.dtype} {list(part.shape)}"
            )
    unknown = parts.keys() - expected.keys()
    if unknown:
        raise CheckpointError(f"{parts[min(unknown)].path}: part {shown(min(unknown))} is not in the manifest")


def _check_hash(folder: Path, name: str, manifest: Manifest) -> None:
    _require_file(folder / name)
    digest = sha256_of(folder / name)
    if digest != manifest.files[name]:
        raise CheckpointError(
            f"{folder / name} is damaged or was changed: its SHA-256 is {digest},"
            f" the manifest says {manifest.files[name]}; convert the model again"
        )


def _require_file(path: Path) -> None:
    if not path.is_file():
        raise CheckpointError(f"{path} is missing; convert the model again")
