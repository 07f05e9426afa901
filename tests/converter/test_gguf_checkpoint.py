from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from support.checkpoints import CHAT_TEMPLATE, U32, llama_config, llama_tensors, raw_gguf, raw_key, write_gguf
from topg.converter.gguf import GgufCheckpoint
from topg.errors import CheckpointError, UnsupportedModelError


def _metadata(path: Path, **extra: Any) -> GgufCheckpoint:
    return GgufCheckpoint(write_gguf(path / "model.gguf", metadata={key.replace("__", "."): value
                                                                   for key, value in extra.items()}))  # fmt: skip


def _without_tensors(path: Path, metadata: dict[str, Any]) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in metadata.items():
        writer.add_key_value(key, value, gguf.GGUFValueType.get_type(value))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def test_settings_lose_the_prefix_of_the_architecture(tmp_path: Path) -> None:
    checkpoint = GgufCheckpoint(write_gguf(tmp_path / "model.gguf"))
    assert checkpoint.architecture_name == "llama"
    assert checkpoint.settings["block_count"] == 2
    assert checkpoint.settings["attention.head_count"] == 4
    assert checkpoint.settings["tokenizer.ggml.model"] == "gpt2"
    assert not any(key.startswith("llama.") for key in checkpoint.settings)


def test_tokenizer_and_template(tmp_path: Path) -> None:
    checkpoint = GgufCheckpoint(write_gguf(tmp_path / "model.gguf"))
    assert checkpoint.chat_template == CHAT_TEMPLATE
    assert len(checkpoint.tokenizer_settings["tokenizer.ggml.tokens"]) == 320
    assert all(key.startswith("tokenizer.") for key in checkpoint.tokenizer_settings)


def test_sampling_values_go_by_their_usual_names(tmp_path: Path) -> None:
    checkpoint = _metadata(tmp_path, general__sampling__temp=0.5, general__sampling__top_k=40)
    assert checkpoint.generation == {"temperature": 0.5, "top_k": 40}


def test_rows_vectors_and_raw_rows(tmp_path: Path) -> None:
    checkpoint = GgufCheckpoint(write_gguf(tmp_path / "model.gguf", weight_type="Q8_0"))
    tensors = llama_tensors(llama_config())
    blocks = gguf.quantize(tensors["lm_head.weight"], gguf.GGMLQuantizationType.Q8_0)
    np.testing.assert_array_equal(checkpoint.raw_rows("output.weight", 3, 9), blocks[3:9])
    values = gguf.dequantize(blocks, gguf.GGMLQuantizationType.Q8_0)
    np.testing.assert_array_equal(checkpoint.rows("output.weight", 3, 9), values[3:9])
    np.testing.assert_array_equal(checkpoint.vector("output_norm.weight"), tensors["model.norm.weight"])
    np.testing.assert_array_equal(checkpoint.rows("output_norm.weight", 3, 9), tensors["model.norm.weight"][3:9])


def test_a_matrix_is_no_vector_and_a_vector_has_no_raw_rows(tmp_path: Path) -> None:
    checkpoint = GgufCheckpoint(write_gguf(tmp_path / "model.gguf"))
    with pytest.raises(CheckpointError, match=r"\[320, 64\]; expected a vector"):
        checkpoint.vector("output.weight")
    with pytest.raises(CheckpointError, match=r"\[64\]; expected a matrix"):
        checkpoint.raw_rows("output_norm.weight", 0, 1)
    with pytest.raises(IndexError, match="do not exist"):
        checkpoint.rows("output_norm.weight", 0, 65)


def test_three_dimensions_count_rows_along_the_first(tmp_path: Path) -> None:
    values = np.arange(2 * 3 * 4, dtype="<f4").reshape(2, 3, 4)
    architecture = raw_key(b"general.architecture", 8, (5).to_bytes(8, "little") + b"llama")
    path = tmp_path / "experts.gguf"
    path.write_bytes(raw_gguf(keys=[architecture], tensors=[(b"x", (4, 3, 2), 0, 0)], data=values.tobytes()))
    np.testing.assert_array_equal(GgufCheckpoint(path).rows("x", 1, 2), values[1:2])


def test_one_part_of_a_split_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match=r"one of 3 parts.*llama-gguf-split --merge"):
        _metadata(tmp_path, split__count=3)


@pytest.mark.parametrize("kind", ["adapter", "mmproj", "vocab"])
def test_what_is_no_model_is_refused_by_its_type(tmp_path: Path, kind: str) -> None:
    path = _without_tensors(tmp_path / "other.gguf", {"general.type": kind})
    with pytest.raises(UnsupportedModelError, match=f"type '{kind}', not a model"):
        GgufCheckpoint(path)


def test_a_vocabulary_without_weights_is_refused(tmp_path: Path) -> None:
    path = _without_tensors(tmp_path / "vocabulary.gguf", {"general.type": "model"})
    with pytest.raises(UnsupportedModelError, match="vocabulary only"):
        GgufCheckpoint(path)


def test_a_file_without_architecture_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "nameless.gguf"
    path.write_bytes(raw_gguf(tensors=[(b"x", (4,), 0, 0)], data=bytes(16)))
    with pytest.raises(CheckpointError, match=r"'general\.architecture' must be a text, not None"):
        GgufCheckpoint(path)


def test_a_key_with_and_without_prefix_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"'block_count' occurs with and without 'llama\.'"):
        _metadata(tmp_path, block_count=5)


def test_old_block_layouts_are_refused(tmp_path: Path) -> None:
    version = raw_key(b"general.quantization_version", U32, (1).to_bytes(4, "little"))
    path = tmp_path / "old.gguf"
    path.write_bytes(raw_gguf(keys=[version], tensors=[(b"x", (32, 1), 2, 0)], data=bytes(18)))
    with pytest.raises(UnsupportedModelError, match="version 1 of the GGUF block layouts"):
        GgufCheckpoint(path)


def test_other_chat_templates_are_mentioned(tmp_path: Path) -> None:
    checkpoint = _metadata(tmp_path, tokenizer__chat_template__tools="{{ messages }}")
    assert checkpoint.chat_template == CHAT_TEMPLATE
    assert "not used: 'tokenizer.chat_template.tools'" in checkpoint.warnings[0]
