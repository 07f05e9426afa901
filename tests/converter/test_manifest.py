"""The manifest: what is written comes back equal; what is damaged, newer or hostile is refused by the key at fault."""

from __future__ import annotations

import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

from support.checkpoints import llama_config, write_huggingface
from topg.converter import ModelConverter
from topg.converter.format import ConvertedModel
from topg.converter.manifest import FORMAT_VERSION, GenerationDefaults, Manifest
from topg.errors import CheckpointError, TopgError

Json = dict[str, Any]


@pytest.fixture(scope="module")
def manifest(tmp_path_factory: pytest.TempPathFactory) -> Manifest:
    folder = tmp_path_factory.mktemp("manifest")
    rope = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64}  # fmt: skip
    source = write_huggingface(
        folder / "source", config=llama_config(rope_scaling=rope), generation={"temperature": 0.5, "top_k": 20}
    )
    return ConvertedModel.open(ModelConverter(source, folder / "model", "int8").convert()).manifest


@pytest.fixture
def data(manifest: Manifest) -> Json:
    return deepcopy(json.loads(json.dumps(manifest.to_json())))


def test_comes_back_equal(manifest: Manifest, data: Json) -> None:
    assert Manifest.from_json(data) == manifest


def test_says_what_was_converted(manifest: Manifest) -> None:
    assert (manifest.architecture, manifest.recipe, manifest.context, manifest.name) == ("llama", "int8", 512, "model")
    assert manifest.generation == GenerationDefaults(temperature=0.5, top_k=20)
    assert manifest.generation.given == {"temperature": 0.5, "top_k": 20}
    assert manifest.tokens.eos == (2,)
    assert manifest.chat_template is not None and "<|im_start|>" in manifest.chat_template
    assert sorted(manifest.source.files) == [
        "config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json",
    ]  # fmt: skip
    assert manifest.source.name == "source"
    record = manifest.tensors["layers.1.attention.query.weight"]
    assert (record.role, record.layer, record.shape, record.precision.weights) == ("query", 1, (64, 64), "int8")
    assert manifest.weight_files == ("model-00001.safetensors",)


def test_a_newer_format_is_refused_in_words(data: Json) -> None:
    data |= {"format_version": FORMAT_VERSION + 1, "topg_version": "9.9", "a_key_of_the_future": 1}
    with pytest.raises(CheckpointError, match=r"converted by a newer ToPG \(9\.9, format 2\).*update ToPG"):
        Manifest.from_json(data)


def _paths(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every place in a JSON value, containers included; of long lists the first and the last entry."""
    keys: list[Any] = []
    if isinstance(value, dict):
        keys = list(value)
    elif isinstance(value, list) and value:
        keys = sorted({0, len(value) // 2, len(value) - 1})
    return [path, *(place for key in keys for place in _paths(value[key], (*path, key)))]


def _replace(data: Json, path: tuple[Any, ...], value: Any) -> Json:
    target: Any = data
    for key in path[:-1]:
        target = target[key]
    target[path[-1]] = value
    return data


def test_every_value_of_a_wrong_type_is_refused(manifest: Manifest) -> None:
    """A list of a nested object where nothing of the kind belongs: at every place of the file."""
    text = json.dumps(manifest.to_json())
    places = [path for path in _paths(json.loads(text)) if path and path[-1:] != ("chat_template",)]
    assert len(places) > 300
    accepted = []
    for path in places:
        try:
            Manifest.from_json(_replace(json.loads(text), path, [{"x": [1]}]))
            accepted.append(path)
        except TopgError:
            pass
    assert accepted == []


def test_every_missing_key_is_refused(manifest: Manifest) -> None:
    """Keys of `generation` and op attributes with a default may be absent; nothing else may."""
    text = json.dumps(manifest.to_json())
    accepted = []
    for path in (path for path in _paths(json.loads(text)) if path and isinstance(path[-1], str)):
        damaged = json.loads(text)
        target: Any = damaged
        for key in path[:-1]:
            target = target[key]
        del target[path[-1]]
        try:
            Manifest.from_json(damaged)
            accepted.append(path)
        except TopgError:
            pass
    optional = {"rope", "window", "softcap", "scaling"}
    free = {"generation", "tensors", "source", "files"}
    assert [path for path in accepted if path[0] not in free and path[-1] not in optional] == []


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("format",), "gguf", "manifest.json.format must be 'topg'"),
        (("format_version",), 0, "format_version must be a positive integer"),
        (("format_version",), True, "format_version must be a positive integer"),
        (("files", "../evil"), "0" * 64, "names '../evil'"),
        (("files", "/etc/passwd"), "0" * 64, "names '/etc/passwd'"),
        (("files", "model-1.safetensors"), "0" * 64, "names 'model-1.safetensors'"),
        (("files", "model-00001.safetensors\n"), "0" * 64, "names 'model-00001.safetensors.n'"),
        (("files", "manifest.json"), "0" * 64, "names 'manifest.json'"),
        (("files", "tokenizer.json"), "xyz", "must be 64 hexadecimal digits"),
        (("files",), {}, "must name tokenizer.json and at least one"),
        (("tensors", "norm.weight", "shape"), [], "1 or 2 sizes"),
        (("tensors", "norm.weight", "shape"), [0], "1 or 2 sizes"),
        (("tensors", "norm.weight", "shape"), [1, 2, 3], "1 or 2 sizes"),
        (("tensors", "norm.weight", "shape"), [2**50], "1 or 2 sizes"),
        (("tensors", "norm.weight", "role"), "nose", "role must be one of"),
        (("tensors", "head.weight", "precision", "group_size"), 3, "group_size"),
        (("tensors", "head.weight", "precision", "group_size"), None, "group_size"),
        (("tensors", "head.weight", "precision", "scale"), "int8", "scale must be one of"),
        (("tensors", "norm.weight", "precision", "weights"), "int8", "group_size"),
        (("plan", 0, "op"), "warp", "op 'warp' is not registered"),
        (("plan", 2, "in_features"), 65, "65"),
        (("plan", 0, "vocab"), 1.5, r"plan\[0\].vocab must be int"),
        (("generation", "temperature"), -1.0, "temperature"),
        (("tokens", "eos"), [-1], "eos"),
        (("unknown",), 1, "no key 'unknown'"),
        (("architecture",), "x", "architecture must be one of gemma3_text, .*, not 'x'"),
        (("recipe",), "x", "recipe must be one of float32, .*, not 'x'"),
        (("context",), 0, "context must be 1 to 2,147,483,648 tokens, not 0"),
        (("context",), -5, "context must be between 0 and .*, not -5"),
        (("context",), 2**52, "context must be 1 to 2,147,483,648 tokens"),
        (("tokens", "eos"), [9999], "the eos token is 9999; ids of this model are 0 to 319"),
        (("tokens", "pad"), 320, "the pad token is 320"),
        (("tokens", "chat_markers"), [320], "the chat marker token is 320"),
        (("plan", 0, "vocab"), 200, "embed 'embed' has 200 rows, the logits 320 columns"),
        (("plan", 1, "eps"), 0, "eps is 0; expected 1e-30 to 1"),
        (("plan", 1, "eps"), 2.0, "eps is 2; expected 1e-30 to 1"),
        (("plan", 5, "scale"), 0, "scale is 0; expected"),
        (("plan", 5, "scale"), 2**40, "scale is 1.09951e.12; expected"),
        (("plan", 5, "softcap"), 0, "softcap is 0; expected"),
        (("plan", 5, "window"), 0, "window is 0; expected 1 or more"),
        (("plan", 5, "layer"), 7, r"attention ops are of layers \[7, 1\]"),
        (("plan", 5, "rope", "dim"), 0, "0 rotated values"),
        (("plan", 5, "rope", "dim"), 3, "3 rotated values"),
        (("plan", 5, "rope", "dim"), 2**40, "1099511627776 values of each head are rotated, and it has 16"),
        (("plan", 5, "rope", "theta"), 1, "theta is 1"),
        (("plan", 5, "rope", "scaling", "factor"), 0, "llama3 factor is 0"),
        (("plan", 5, "rope", "scaling", "original_length"), 0, "llama3 original_length is 0"),
    ],
)
def test_names_what_is_wrong(data: Json, path: tuple[Any, ...], value: Any, message: str) -> None:
    with pytest.raises(CheckpointError if path != ("plan", 0, "op") else TopgError, match=message):
        Manifest.from_json(_replace(data, path, value))


def test_text_survives(manifest: Manifest, tmp_path: Path, data: Json) -> None:
    data["chat_template"] = "{{ 'é\u2028\x00😀' }}"
    assert Manifest.from_json(json.loads(json.dumps(data, ensure_ascii=False))).chat_template == data["chat_template"]
