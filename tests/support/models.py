"""Tiny converted models for tests of what runs on top of them."""

from __future__ import annotations

import json
from pathlib import Path

from support.checkpoints import llama_config, llama_tensors, write_huggingface
from topg.converter.convert import ModelConverter


def tiny_converted(folder: Path, *, chat: bool = True) -> Path:
    """A random Llama in float32, converted below `folder`; without `chat` it has no chat template."""
    source = write_huggingface(folder / "tiny", tensors=llama_tensors(llama_config()))
    if not chat:
        path = source / "tokenizer_config.json"
        settings = json.loads(path.read_text())
        del settings["chat_template"]
        path.write_text(json.dumps(settings))
    return ModelConverter(source, folder / "converted", "float32").convert()
