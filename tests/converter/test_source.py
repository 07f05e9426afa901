from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from support.checkpoints import as_bfloat16, llama_config, llama_tensors, write_gguf, write_huggingface
from topg.converter.source import CheckpointSource, open_source
from topg.errors import CheckpointError, ModelNotFoundError, UnsupportedModelError


def test_both_formats_give_the_same_values(tmp_path: Path) -> None:
    folder: CheckpointSource = open_source(write_huggingface(tmp_path / "folder"))
    file: CheckpointSource = open_source(write_gguf(tmp_path / "model.gguf"))
    assert (folder.kind, file.kind) == ("huggingface", "gguf")
    np.testing.assert_array_equal(folder.rows("lm_head.weight", 7, 20), file.rows("output.weight", 7, 20))
    assert folder.chat_template == file.chat_template


def test_a_folder_with_one_gguf_is_that_gguf(tmp_path: Path) -> None:
    write_gguf(tmp_path / "model.gguf")
    assert open_source(tmp_path).files() == [tmp_path / "model.gguf"]


def test_of_several_ggufs_one_must_be_named(tmp_path: Path) -> None:
    write_gguf(tmp_path / "a.gguf")
    shutil.copy(tmp_path / "a.gguf", tmp_path / "b.gguf")
    with pytest.raises(CheckpointError, match=r"2 GGUF files, name one of them: 'a\.gguf', 'b\.gguf'"):
        open_source(tmp_path)


def test_pickles_are_refused_unopened(tmp_path: Path) -> None:
    write_huggingface(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(UnsupportedModelError, match=r"'pytorch_model\.bin': pickle files.*safetensors first"):
        open_source(tmp_path)


def test_an_adapter_is_refused(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    (tmp_path / "adapter_model.safetensors").write_bytes(b"")
    with pytest.raises(UnsupportedModelError, match="adapter, not a model: merge"):
        open_source(tmp_path)


def test_what_was_found_instead_is_said(tmp_path: Path) -> None:
    (tmp_path / "readme.md").write_text("")
    with pytest.raises(ModelNotFoundError, match=r"it holds 'readme\.md'"):
        open_source(tmp_path)
    with pytest.raises(ModelNotFoundError, match=r"not a \.gguf file"):
        open_source(tmp_path / "readme.md")
    with pytest.raises(ModelNotFoundError, match="neither a file nor a folder"):
        open_source(tmp_path / "nowhere")


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_halves_are_read_exactly(tmp_path: Path, dtype: str) -> None:
    tensors = llama_tensors(llama_config())
    source = open_source(write_huggingface(tmp_path, dtype=dtype))
    for name, values in tensors.items():
        expected = as_bfloat16(values) if dtype == "bfloat16" else values.astype(dtype).astype(np.float32)
        np.testing.assert_array_equal(source.rows(name, 0, len(values)), expected)
