"""Opening a converted model: everything but the weights' contents is checked, and `verify` checks those."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support.checkpoints import Floats, llama_config, llama_tensors, write_huggingface
from topg.converter import ModelConverter
from topg.converter.format import ConvertedModel, is_converted, part_name, stored_parts
from topg.converter.safetensors_file import SafetensorsFile
from topg.converter.safetensors_writer import SafetensorsWriter
from topg.errors import CheckpointError, ModelNotFoundError, TopgError
from topg.precision.formats import Part

WEIGHTS = "model-00001.safetensors"


@pytest.fixture(scope="module")
def tensors() -> dict[str, Floats]:
    return llama_tensors(llama_config())


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory, tensors: dict[str, Floats]) -> Path:
    folder = tmp_path_factory.mktemp("format")
    return ModelConverter(write_huggingface(folder / "source", tensors=tensors), folder / "model", "float32").convert()


@pytest.fixture
def copy(converted: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(converted, tmp_path / "copy"))


def test_weights_are_mapped_and_read_only(converted: Path, tensors: dict[str, Floats]) -> None:
    model = ConvertedModel.open(converted)
    values = model.part("head.weight", "values")
    np.testing.assert_array_equal(values, tensors["lm_head.weight"])
    with pytest.raises(ValueError, match="read-only"):
        values[0, 0] = 1
    assert model.shape("head.weight") == values.shape
    assert model.parts("head.weight").keys() == {"values"}
    assert model.tokenizer_file.is_file()
    assert model.plan.vocab == values.shape[0]
    model.verify()


def test_weights_stand_in_the_order_of_the_plan(converted: Path) -> None:
    """Tensors of whole 64-byte lines, which are all of this model's."""
    model = ConvertedModel.open(converted)
    file = SafetensorsFile(converted / WEIGHTS)
    stored = sorted(file.tensor_names, key=lambda name: file.tensors[name].offset)
    assert stored == [name for name, _ in stored_parts(model.manifest)]
    assert stored == [part_name(name, "values") for name in model.plan.tensor_names]


def test_a_folder_without_manifest_is_no_model(tmp_path: Path) -> None:
    assert not is_converted(tmp_path)
    with pytest.raises(ModelNotFoundError, match=r"not a converted model.*topg convert"):
        ConvertedModel.open(tmp_path)
    with pytest.raises(ModelNotFoundError, match=r"no such folder"):
        ConvertedModel.open(tmp_path / "nowhere")


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def _extend(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"x")


@pytest.mark.parametrize("damage", [Path.unlink, _cut, _extend])
@pytest.mark.parametrize("name", [WEIGHTS, "tokenizer.json", "manifest.json"])
def test_missing_and_cut_files_are_named(copy: Path, damage: Callable[[Path], None], name: str) -> None:
    damage(copy / name)
    with pytest.raises(TopgError, match=name):
        ConvertedModel.open(copy)


def test_a_changed_weight_is_found_by_verify(copy: Path) -> None:
    path = copy / WEIGHTS
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(data)
    model = ConvertedModel.open(copy)
    with pytest.raises(CheckpointError, match=rf"{WEIGHTS} is damaged or was changed"):
        model.verify()


def _rewrite(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Write the weights file again with changed tensors."""
    file = SafetensorsFile(folder / WEIGHTS)
    arrays = {name: np.array(file.array(name)) for name in file.tensor_names}
    change(arrays)
    (folder / WEIGHTS).unlink()
    parts = {name: Part(str(values.dtype), values.shape) for name, values in arrays.items()}  # type: ignore[arg-type]
    with SafetensorsWriter(folder / WEIGHTS, parts, {}) as writer:
        for name, values in arrays.items():
            writer.write(name, values)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda arrays: arrays.pop("norm.weight.values"), r"'norm\.weight\.values' of the converted model is missing"),
        (lambda arrays: arrays.update(stranger=np.zeros(4, np.int8)), r"'stranger' is not in the manifest"),
        (
            lambda arrays: arrays.update({"norm.weight.values": np.zeros(63, np.float32)}),
            r"'norm\.weight\.values' is float32 \[63\]; the manifest says float32 \[64\]",
        ),
        (
            lambda arrays: arrays.update({"norm.weight.values": np.zeros(64, np.float16)}),
            r"is float16 \[64\]; the manifest says float32 \[64\]",
        ),
    ],
)
def test_parts_must_be_those_of_the_manifest(copy: Path, change: Callable[[Any], None], message: str) -> None:
    _rewrite(copy, change)
    with pytest.raises(CheckpointError, match=message):
        ConvertedModel.open(copy)


def test_a_part_stored_twice_is_refused(copy: Path) -> None:
    shutil.copy(copy / WEIGHTS, copy / "model-00002.safetensors")
    manifest = json.loads((copy / "manifest.json").read_text())
    manifest["files"]["model-00002.safetensors"] = manifest["files"][WEIGHTS]
    (copy / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(CheckpointError, match=r"is stored twice, the second time in model-00002"):
        ConvertedModel.open(copy)


def _drop_tensor(manifest: Any) -> None:
    del manifest["tensors"]["norm.weight"]


def _add_tensor(manifest: Any) -> None:
    manifest["tensors"]["stranger"] = manifest["tensors"]["norm.weight"]


def _grow_tensor(manifest: Any) -> None:
    manifest["tensors"]["head.weight"]["shape"] = [10**9, 64]


def _change_tokenizer(manifest: Any) -> None:
    manifest["files"]["tokenizer.json"] = "0" * 64


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_drop_tensor, r"the plan uses tensors that do not exist: 'norm\.weight'"),
        (_add_tensor, r"the plan does not use these tensors: 'stranger'"),
        (_grow_tensor, r"head\.weight .* has shape \[1000000000, 64\]; expected \[320, 64\]"),
        (_change_tokenizer, r"tokenizer\.json is damaged or was changed"),
    ],
)
def test_the_manifest_must_fit_plan_and_files(copy: Path, change: Callable[[Any], None], message: str) -> None:
    manifest = json.loads((copy / "manifest.json").read_text())
    change(manifest)
    (copy / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(CheckpointError, match=message):
        ConvertedModel.open(copy)
