from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support.checkpoints import CHAT_TEMPLATE, llama_config, llama_tensors, write_huggingface, write_safetensors
from topg.converter.huggingface import HuggingFaceCheckpoint
from topg.errors import CheckpointError, ModelError, ModelNotFoundError, UnsupportedModelError

INDEX = "model.safetensors.index.json"
SECOND = "model-00002-of-00003.safetensors"
CODE = {"AutoConfig": "custom.Config", "AutoModelForCausalLM": "custom.Model"}


def _edit(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def _weight_map(folder: Path) -> dict[str, str]:
    weight_map: dict[str, str] = json.loads((folder / INDEX).read_text())["weight_map"]
    return weight_map


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_huggingface(tmp_path / "model")


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    return write_huggingface(tmp_path / "sharded", shards=3)


def test_a_folder_is_read(folder: Path) -> None:
    checkpoint = HuggingFaceCheckpoint(folder)
    tensors = llama_tensors(llama_config())
    assert checkpoint.architecture_name == "llama"
    assert checkpoint.settings["hidden_size"] == 64
    assert checkpoint.generation == {"eos_token_id": [2, 0]}
    assert checkpoint.chat_template == CHAT_TEMPLATE
    assert checkpoint.tokenizer_file == folder / "tokenizer.json"
    assert checkpoint.warnings == []
    assert set(checkpoint.tensor_names) == set(tensors)
    np.testing.assert_array_equal(checkpoint.rows("lm_head.weight", 3, 9), tensors["lm_head.weight"][3:9])
    np.testing.assert_array_equal(checkpoint.vector("model.norm.weight"), tensors["model.norm.weight"])
    raw = checkpoint.raw_rows("lm_head.weight", 3, 9)
    np.testing.assert_array_equal(raw.view(np.float32), tensors["lm_head.weight"][3:9])


def test_shards_are_one_model(sharded: Path) -> None:
    checkpoint = HuggingFaceCheckpoint(sharded)
    for name, values in llama_tensors(llama_config()).items():
        np.testing.assert_array_equal(checkpoint.rows(name, 0, len(values)), values)
    assert {path.name for path in checkpoint.files()} == {path.name for path in sharded.iterdir()}


def test_a_missing_shard_is_named(sharded: Path) -> None:
    (sharded / SECOND).unlink()
    with pytest.raises(CheckpointError, match=rf"{SECOND} is missing; {INDEX} says it holds tensor"):
        HuggingFaceCheckpoint(sharded)


def test_a_short_shard_is_named(sharded: Path) -> None:
    (sharded / SECOND).write_bytes((sharded / SECOND).read_bytes()[:-100])
    with pytest.raises(CheckpointError, match=f"{SECOND} is cut short"):
        HuggingFaceCheckpoint(sharded)


def test_a_tensor_its_shard_lacks_is_named(sharded: Path) -> None:
    _edit(sharded / INDEX, weight_map=_weight_map(sharded) | {"phantom.weight": SECOND})
    with pytest.raises(CheckpointError, match=rf"{SECOND} lacks tensor 'phantom\.weight'"):
        HuggingFaceCheckpoint(sharded)


def test_a_tensor_the_index_lacks_is_named(sharded: Path) -> None:
    weight_map = _weight_map(sharded)
    del weight_map["lm_head.weight"]
    _edit(sharded / INDEX, weight_map=weight_map)
    with pytest.raises(CheckpointError, match=r"holds tensor 'lm_head\.weight', which model\S+ does not name"):
        HuggingFaceCheckpoint(sharded)


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        ("a.safetensors", r"\Sa\.safetensors holds tensor 'lm_head\.weight', which \S+ says is in 'model-00003"),
        ("z.safetensors", r"'lm_head\.weight' is stored twice: in \S+model-00003\S+ and in \S+z\.safetensors"),
    ],
)
def test_a_tensor_in_two_shards_is_named(sharded: Path, extra: str, words: str) -> None:
    tensors = llama_tensors(llama_config())
    write_safetensors(
        sharded / extra, {"own": tensors["model.norm.weight"], "lm_head.weight": tensors["lm_head.weight"]}
    )
    _edit(sharded / INDEX, weight_map=_weight_map(sharded) | {"own": extra})
    with pytest.raises(CheckpointError, match=words):
        HuggingFaceCheckpoint(sharded)


@pytest.mark.parametrize(
    "shard", ["../model.safetensors", "/tmp/model.safetensors", "a/b.safetensors", "..\\b.safetensors", "c.bin", "", 5,
              ".hidden.safetensors"],
)  # fmt: skip
def test_an_index_cannot_point_elsewhere(sharded: Path, shard: Any) -> None:
    _edit(sharded / INDEX, weight_map=_weight_map(sharded) | {"lm_head.weight": shard})
    with pytest.raises(CheckpointError, match=r"no \.safetensors file of this folder"):
        HuggingFaceCheckpoint(sharded)


@pytest.mark.parametrize("weight_map", [None, [], {}, "model.safetensors"])
def test_an_index_without_a_map_is_refused(sharded: Path, weight_map: Any) -> None:
    _edit(sharded / INDEX, weight_map=weight_map)
    with pytest.raises(CheckpointError, match="weight_map must say"):
        HuggingFaceCheckpoint(sharded)


def test_a_single_file_beside_an_index_counts_with_a_warning(sharded: Path) -> None:
    write_safetensors(sharded / "model.safetensors", llama_tensors(llama_config()))
    assert "index and its shards are not used" in HuggingFaceCheckpoint(sharded).warnings[0]


@pytest.mark.parametrize("name", ["adapter.safetensors", "pytorch_model.bin", "pytorch_model-00001-of-00002.bin"])
@pytest.mark.parametrize("kind", ["folder", "sharded"])
def test_weights_that_are_not_used_are_mentioned(
    kind: str, name: str, request: pytest.FixtureRequest
) -> None:  # fmt: skip
    path: Path = request.getfixturevalue(kind)
    (path / name).write_bytes(b"other weights")
    (warning,) = HuggingFaceCheckpoint(path).warnings
    assert warning.endswith(f"also holds weights that are not used: {name!r}")


def test_weights_must_be_a_file(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").mkdir()
    with pytest.raises(CheckpointError, match=r"model\.safetensors is a folder or a device"):
        HuggingFaceCheckpoint(folder)
    (folder / "model.safetensors").rmdir()
    os.mkfifo(folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"model\.safetensors is a folder or a device"):
        HuggingFaceCheckpoint(folder)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
def test_a_missing_file_is_named(folder: Path, name: str) -> None:
    (folder / name).unlink()
    with pytest.raises(ModelNotFoundError, match=f"has (no|neither) {name}"):
        HuggingFaceCheckpoint(folder)


def test_shards_without_an_index_are_named(sharded: Path) -> None:
    (sharded / INDEX).unlink()
    with pytest.raises(ModelNotFoundError, match=r"nor model\.safetensors\.index\.json; it has 'model-00001-of-00003"):
        HuggingFaceCheckpoint(sharded)


def test_how_to_make_a_tokenizer_file_is_said(folder: Path) -> None:
    (folder / "tokenizer.json").rename(folder / "tokenizer.model")
    with pytest.raises(ModelNotFoundError, match=r"only tokenizer\.model.*AutoTokenizer\.from_pretrained"):
        HuggingFaceCheckpoint(folder)


@pytest.mark.parametrize("content", ["[]", "{", "\xff", '{"a": NaN}', "[" * 200_000, ""])
@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "tokenizer_config.json"])
def test_a_damaged_file_is_named(folder: Path, name: str, content: str) -> None:
    (folder / name).write_bytes(content.encode("latin-1"))
    with pytest.raises(CheckpointError, match=name):
        HuggingFaceCheckpoint(folder)


@pytest.mark.parametrize("model_type", [None, 5, ""])
def test_a_config_without_architecture_is_refused(folder: Path, model_type: Any) -> None:
    _edit(folder / "config.json", model_type=model_type)
    with pytest.raises(CheckpointError, match="model_type must name the architecture"):
        _ = HuggingFaceCheckpoint(folder).architecture_name


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"quant_method": "gptq", "bits": 4, "group_size": 128}, r"gptq \(bits=4, group_size=128\)"),
        ({"quant_method": "awq", "bits": 4}, r"awq \(bits=4\)"),
        ({"quant_method": "compressed-tensors", "format": "pack-quantized"}, r"compressed-tensors \(format=pack"),
        ({"quant_method": "fp8", "fmt": "e4m3"}, r"fp8 \(fmt=e4m3\)"),
        ({"load_in_4bit": True}, r"an unnamed method \(load_in_4bit=True\)"),
        ("yes", "unknown settings 'yes'"),
    ],
)
@pytest.mark.parametrize("key", ["quantization_config", "compression_config"])
def test_quantised_models_are_refused_by_method(folder: Path, key: str, settings: Any, words: str) -> None:
    _edit(folder / "config.json", **{key: settings})
    with pytest.raises(UnsupportedModelError, match=f"quantised with {words}.*convert the original"):
        HuggingFaceCheckpoint(folder)


@pytest.mark.parametrize("name", ["config.json", "tokenizer_config.json"])
def test_a_models_own_code_is_never_run(folder: Path, name: str) -> None:
    marker = folder / "marker"
    (folder / "custom.py").write_text(f"open({str(marker)!r}, 'w')")
    _edit(folder / name, auto_map=CODE)
    assert "not run, the built-in llama model is used" in HuggingFaceCheckpoint(folder).warnings[0]
    _edit(folder / "config.json", model_type="custom")
    with pytest.raises(UnsupportedModelError, match="never run, and model_type 'custom' is not built in"):
        HuggingFaceCheckpoint(folder)
    assert not marker.exists()


@pytest.mark.parametrize("kind", ["int32", "uint8", "float64"])
def test_other_types_are_no_weights(folder: Path, kind: str) -> None:
    write_safetensors(folder / "model.safetensors", {"packed": np.zeros((4, 4), kind)})
    checkpoint = HuggingFaceCheckpoint(folder)
    for read in (checkpoint.check_type, lambda name: checkpoint.rows(name, 0, 1)):
        with pytest.raises(UnsupportedModelError, match=rf"'packed' has type {kind}; weights must be float32"):
            read("packed")


def test_a_matrix_is_no_vector(folder: Path) -> None:
    with pytest.raises(CheckpointError, match=r"\[320, 64\]; expected a vector"):
        HuggingFaceCheckpoint(folder).vector("lm_head.weight")


def test_a_missing_tensor_is_named(folder: Path) -> None:
    with pytest.raises(CheckpointError, match="has no tensor 'score'"):
        HuggingFaceCheckpoint(folder).shape("score")


def test_the_template_file_counts_before_the_tokenizers_config(folder: Path) -> None:
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": "from json"}))
    assert HuggingFaceCheckpoint(folder).chat_template == "from json"
    (folder / "chat_template.jinja").write_text("from jinja")
    assert HuggingFaceCheckpoint(folder).chat_template == "from jinja"
    assert folder / "chat_template.jinja" in HuggingFaceCheckpoint(folder).files()


def test_of_several_templates_the_default_counts(folder: Path) -> None:
    templates = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]
    _edit(folder / "tokenizer_config.json", chat_template=templates)
    checkpoint = HuggingFaceCheckpoint(folder)
    assert checkpoint.chat_template == "plain"
    assert "not used: 'tool_use'" in checkpoint.warnings[0]
    _edit(folder / "tokenizer_config.json", chat_template=templates[1:])
    with pytest.raises(CheckpointError, match="no template named default, only 'tool_use'"):
        HuggingFaceCheckpoint(folder)


@pytest.mark.parametrize("template", [5, ["a"], [{"name": "default"}], {"default": "a"}])
def test_a_template_of_another_kind_is_refused(folder: Path, template: Any) -> None:
    _edit(folder / "tokenizer_config.json", chat_template=template)
    with pytest.raises(CheckpointError, match="chat_template must be a string"):
        HuggingFaceCheckpoint(folder)


def test_a_base_model_has_no_template(folder: Path) -> None:
    _edit(folder / "tokenizer_config.json", chat_template=None)
    assert HuggingFaceCheckpoint(folder).chat_template is None


def test_optional_files_may_be_absent(folder: Path) -> None:
    (folder / "generation_config.json").unlink()
    (folder / "tokenizer_config.json").unlink()
    checkpoint = HuggingFaceCheckpoint(folder)
    assert (checkpoint.generation, checkpoint.tokenizer_settings, checkpoint.chat_template) == ({}, {}, None)


def test_sizes_are_bounded(folder: Path) -> None:
    for name, size in (("config.json", 5 << 20), ("tokenizer.json", 65 << 20), ("chat_template.jinja", 2 << 20)):
        kept = (folder / name).read_bytes() if (folder / name).exists() else b""
        with (folder / name).open("wb") as file:
            file.truncate(size)
        with pytest.raises(ModelError, match=f"{name} has {size} bytes; at most"):
            HuggingFaceCheckpoint(folder)
        (folder / name).write_bytes(kept)
