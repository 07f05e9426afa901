"""A Hugging Face model folder: config, tokenizer files and safetensors weights, in one file or in shards.

Only data is read: Python files that came with the model are never run, and pickled weights are never opened.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from topg.converter.file_blocks import Bytes
from topg.converter.safetensors_file import AnyArray, SafetensorsFile
from topg.converter.strict_json import read_object
from topg.converter.wording import listed
from topg.errors import CheckpointError, ModelNotFoundError, UnsupportedModelError
from topg.precision.bfloat16 import from_bfloat16
from topg.wording import printable, shown

CONFIG = "config.json"
GENERATION_CONFIG = "generation_config.json"
TOKENIZER = "tokenizer.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
CHAT_TEMPLATE = "chat_template.jinja"
OLD_CHAT_TEMPLATE = "chat_template.json"
SINGLE_FILE = "model.safetensors"
INDEX = "model.safetensors.index.json"

MAX_JSON_BYTES = 4 << 20  # a tokenizer_config.json that lists thousands of added tokens has one
MAX_INDEX_BYTES = 16 << 20
MAX_TOKENIZER_BYTES = 64 << 20
MAX_TEMPLATE_BYTES = 1 << 20
MAX_NAME_BYTES = 255  # of a file
WEIGHT_TYPES = ("float32", "float16", "bfloat16")
WEIGHT_PATTERNS = ("*.safetensors", "pytorch_model*.bin")
CODE_KEYS = ("auto_map", "custom_pipelines")


class HuggingFaceCheckpoint:
    """An opened and checked folder.

    Opening raises ModelNotFoundError for a file that is needed and not there, CheckpointError for one that is damaged
    or contradicts another, and UnsupportedModelError for quantised models and those that only run with their own code.
    `warnings` are sentences that the user should see.
    """

    kind: Literal["huggingface"] = "huggingface"

    def __init__(self, folder: str | Path) -> None:
        self.path = Path(folder)
        self.warnings: list[str] = []
        self.settings: Mapping[str, Any] = _read_required_object(self.path / CONFIG)
        self.tokenizer_file = _find_tokenizer(self.path)
        self.tokenizer_settings: Mapping[str, Any] = _read_optional_object(self.path / TOKENIZER_CONFIG)
        self.generation: Mapping[str, Any] = _read_optional_object(self.path / GENERATION_CONFIG)
        _refuse_quantised(self.path, self.settings)
        self.warnings += _check_code(self.path, self.architecture_name, self.settings, self.tokenizer_settings)
        self.chat_template = _read_chat_template(self.path, self.tokenizer_settings, self.warnings)
        self._shards: Mapping[str, SafetensorsFile] = _open_weights(self.path, self.warnings)

    @property
    def architecture_name(self) -> str:
        """The config's model_type."""
        name = self.settings.get("model_type")
        if not isinstance(name, str) or not name:
            raise CheckpointError(f"{self.path / CONFIG}: model_type must name the architecture, not be {shown(name)}")
        return name

    @property
    def tensor_names(self) -> Collection[str]:
        """Names of all stored tensors."""
        return self._shards.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor."""
        return self._shard(name).shape(name)

    def type_name(self, name: str) -> str:
        """Element type of a tensor ("bfloat16")."""
        return self._shard(name).dtype(name)

    def check_type(self, name: str) -> None:
        """Raises UnsupportedModelError unless the tensor's values can be read as float32."""
        if self.type_name(name) not in WEIGHT_TYPES:
            raise UnsupportedModelError(
                f"{self._shard(name).path}: tensor {shown(name)} has type {self.type_name(name)}; weights must be"
                f" {', '.join(WEIGHT_TYPES)}: convert the original, unquantised model"
            )

    def vector(self, name: str) -> npt.NDArray[np.float32]:
        """A one-dimensional tensor in float32."""
        if len(self.shape(name)) != 1:
            raise CheckpointError(
                f"{self.path}: tensor {shown(name)} has shape {list(self.shape(name))}; expected a vector"
            )
        return self.rows(name, 0, self.shape(name)[0])

    def rows(self, name: str, start: int, stop: int) -> npt.NDArray[np.float32]:
        """Rows start..stop along the first dimension in float32, exactly; memory in proportion to their number."""
        self.check_type(name)
        values = self._shard(name).read_rows(name, start, stop)
        return from_bfloat16(values) if self.type_name(name) == "bfloat16" else values.astype(np.float32, copy=False)

    def raw_rows(self, name: str, start: int, stop: int) -> Bytes:
        """The stored bytes of rows start..stop of a matrix, [stop - start, bytes per row]."""
        values: AnyArray = self._shard(name).read_rows(name, start, stop)
        row_bytes = values.dtype.itemsize * int(np.prod(values.shape[1:], dtype=np.int64))
        return values.view(np.uint8).reshape(stop - start, row_bytes)

    def files(self) -> list[Path]:
        """Every file that was or may be read, sorted: what a record of the conversion must name."""
        named = (CONFIG, GENERATION_CONFIG, TOKENIZER, TOKENIZER_CONFIG, CHAT_TEMPLATE, OLD_CHAT_TEMPLATE, INDEX)
        present = {self.path / name for name in named if (self.path / name).is_file()}
        return sorted(present | {shard.path for shard in self._shards.values()})

    def _shard(self, name: str) -> SafetensorsFile:
        if name not in self._shards:
            raise CheckpointError(f"{self.path} has no tensor {shown(name)}")
        return self._shards[name]


def _read_required_object(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise ModelNotFoundError(f"{path.parent} has no {path.name}: it is not a complete Hugging Face model folder")
    return read_object(path, MAX_JSON_BYTES)


def _read_optional_object(path: Path) -> dict[str, Any]:
    return read_object(path, MAX_JSON_BYTES) if path.is_file() else {}


def _find_tokenizer(folder: Path) -> Path:
    path = folder / TOKENIZER
    if path.is_file():
        if path.stat().st_size > MAX_TOKENIZER_BYTES:
            raise CheckpointError(f"{path} has {path.stat().st_size} bytes; at most {MAX_TOKENIZER_BYTES} are read")
        return path
    others = [name for name in ("tokenizer.model", "vocab.json", "spiece.model") if (folder / name).is_file()]
    found = f" (only {', '.join(others)})" if others else ""
    raise ModelNotFoundError(
        f"{folder} has no {TOKENIZER}{found}. Make it with the transformers package:"
        " AutoTokenizer.from_pretrained(folder, use_fast=True).save_pretrained(folder)"
    )


def _refuse_quantised(folder: Path, settings: Mapping[str, Any]) -> None:
    for key in ("quantization_config", "compression_config", "quantization", "quant_config"):
        quantised = settings.get(key)
        if quantised:
            raise UnsupportedModelError(
                f"{folder} was quantised with {_describe_quantisation(quantised)}, which is not read:"
                " convert the original, unquantised model"
            )


def _describe_quantisation(config: Any) -> str:
    """A short form: "gptq (bits=4, group_size=128)"."""
    if not isinstance(config, Mapping):
        return f"unknown settings {shown(config)}"
    method = config.get("quant_method", "an unnamed method")
    details = [f"{key}={config[key]}" for key in ("bits", "group_size", "fmt", "format", "load_in_4bit", "load_in_8bit")
             if isinstance(config.get(key), int | str)]  # fmt: skip
    return printable(f"{method!s:.60}" + (f" ({', '.join(details):.120})" if details else ""))


def _check_code(folder: Path, model_type: str, *settings: Mapping[str, Any]) -> list[str]:
    """Warnings about code that came with the model; raises UnsupportedModelError when the model needs it."""
    from topg.models import supported

    if not any(values.get(key) for values in settings for key in CODE_KEYS):
        return []
    if model_type not in supported():
        raise UnsupportedModelError(
            f"{folder} needs Python code of its own (auto_map), which is never run, and model_type"
            f" {shown(model_type)} is not built in; built in are: {', '.join(supported())}"
        )
    return [f"{folder} names Python code of its own (auto_map); it is not run, the built-in {model_type} model is used"]


def _read_chat_template(folder: Path, tokenizer_settings: Mapping[str, Any], warnings: list[str]) -> str | None:
    """The chat template: from its own file if there is one, else from the tokenizer's config."""
    path = folder / CHAT_TEMPLATE
    if path.is_file():
        return _read_template_file(path)
    if (folder / OLD_CHAT_TEMPLATE).is_file():
        template = read_object(folder / OLD_CHAT_TEMPLATE, MAX_TEMPLATE_BYTES).get("chat_template")
        return _pick_template(folder / OLD_CHAT_TEMPLATE, template, warnings)
    return _pick_template(folder / TOKENIZER_CONFIG, tokenizer_settings.get("chat_template"), warnings)


def _read_template_file(path: Path) -> str:
    if path.stat().st_size > MAX_TEMPLATE_BYTES:
        raise CheckpointError(f"{path} has {path.stat().st_size} bytes; at most {MAX_TEMPLATE_BYTES} are read")
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{path} is not valid UTF-8") from error


def _pick_template(path: Path, value: Any, warnings: list[str]) -> str | None:
    """A template, or of a list of named ones the one called "default"."""
    if value is None or isinstance(value, str):
        return value
    if not isinstance(value, list) or not all(_is_named_template(item) for item in value):
        raise CheckpointError(f"{path}: chat_template must be a string, or a list of names and templates")
    templates = {item["name"]: item["template"] for item in value}
    if "default" not in templates:
        raise CheckpointError(f"{path}: chat_template has no template named default, only {listed(sorted(templates))}")
    others = sorted(templates.keys() - {"default"})
    if others:
        warnings.append(f"{path}: the chat template named default is used; not used: {listed(others)}")
    return str(templates["default"])


def _is_named_template(item: Any) -> bool:
    return isinstance(item, dict) and all(isinstance(item.get(key), str) for key in ("name", "template"))


def _open_weights(folder: Path, warnings: list[str]) -> dict[str, SafetensorsFile]:
    """The file of every tensor.  Of a single file and an index, the file counts, as everywhere."""
    if (folder / SINGLE_FILE).exists():
        if (folder / INDEX).is_file():
            warnings.append(f"{folder} has both {SINGLE_FILE} and {INDEX}; the index and its shards are not used")
        warnings += _unused_warning(folder, {SINGLE_FILE})
        shard = SafetensorsFile(folder / SINGLE_FILE)
        return dict.fromkeys(shard.tensor_names, shard)
    if (folder / INDEX).is_file():
        weight_map = _read_index(folder / INDEX)
        warnings += _unused_warning(folder, set(weight_map.values()))
        return _open_shards(folder, weight_map)
    found = sorted(path.name for path in folder.glob("*.safetensors"))
    raise ModelNotFoundError(
        f"{folder} has neither {SINGLE_FILE} nor {INDEX}" + (f"; it has {listed(found)}" if found else "")
    )


def _unused_warning(folder: Path, used: Collection[str]) -> list[str]:
    """Other files that look like weights of the model."""
    names = sorted(path.name for pattern in WEIGHT_PATTERNS for path in folder.glob(pattern))
    unused = [name for name in names if name not in used]
    return [f"{folder} also holds weights that are not used: {listed(unused)}"] if unused else []


def _read_index(path: Path) -> dict[str, str]:
    """Shard of every tensor; names of shards are plain file names."""
    weight_map = read_object(path, MAX_INDEX_BYTES).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{path}: weight_map must say in which file each tensor is")
    for tensor, shard in weight_map.items():
        if not isinstance(shard, str) or not _is_plain_file_name(shard):
            raise CheckpointError(
                f"{path}: tensor {shown(tensor)} is said to be in {shown(shard)}, no .safetensors file of this folder"
            )
    return weight_map


def _is_plain_file_name(name: str) -> bool:
    usable = len(name.encode(errors="replace")) <= MAX_NAME_BYTES and name.isprintable()
    return usable and name.endswith(".safetensors") and not set(name) & set("/\\:") and name[0] != "."


def _open_shards(folder: Path, weight_map: Mapping[str, str]) -> dict[str, SafetensorsFile]:
    """Open all shards; together they hold exactly the tensors of the index, each where the index says."""
    found: dict[str, SafetensorsFile] = {}
    for shard_name in sorted(set(weight_map.values())):
        if not (folder / shard_name).is_file():
            tensor = next(name for name, shard in weight_map.items() if shard == shard_name)
            raise CheckpointError(f"{folder / shard_name} is missing; {INDEX} says it holds tensor {shown(tensor)}")
        shard = SafetensorsFile(folder / shard_name)
        for tensor in shard.tensor_names:
            _check_place(shard, tensor, weight_map, found)
            found[tensor] = shard
    for name, shard_name in weight_map.items():
        if name not in found:
            raise CheckpointError(f"{folder / shard_name} lacks tensor {shown(name)}, which {INDEX} says it holds")
    return found


def _check_place(
    shard: SafetensorsFile, tensor: str, weight_map: Mapping[str, str], found: Mapping[str, SafetensorsFile]
) -> None:
    if tensor in found:
        raise CheckpointError(f"tensor {shown(tensor)} is stored twice: in {found[tensor].path} and in {shard.path}")
    if tensor not in weight_map:
        raise CheckpointError(f"{shard.path} holds tensor {shown(tensor)}, which {INDEX} does not name")
    if weight_map[tensor] != shard.path.name:
        raise CheckpointError(
            f"{shard.path} holds tensor {shown(tensor)}, which {INDEX} says is in {shown(weight_map[tensor])}"
        )
