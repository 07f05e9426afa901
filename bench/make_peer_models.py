"""One model in every form that `bench/peers.py` compares, made from one GGUF file.

    python bench/make_peer_models.py SOURCE.gguf FOLDER [--formats q8_0 q4_0 bf16 f16 huggingface ctranslate2]

All forms hold the values of the source rounded to their own format, so that every engine runs the same model.

    q8_0.gguf, q4_0.gguf, bf16.gguf, f16.gguf   matrices in that type; in q4_0.gguf embedding and head are Q8_0
    huggingface/                                bfloat16 safetensors, with tokenizer and config
    ctranslate2-int8/                           CTranslate2's int8, made from huggingface/; the package ctranslate2 is
                                                needed beside torch and transformers
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter, LlamaFileType, ReaderTensor
from gguf.quants import dequantize, quantize
from transformers import AutoModelForCausalLM, AutoTokenizer

HUGGINGFACE = "huggingface"
CTRANSLATE2 = "ctranslate2"
HEAD_TENSORS = ("token_embd.weight", "output.weight")
WRITTEN_ANEW = ("GGUF.version", "GGUF.tensor_count", "GGUF.kv_count", "general.architecture", "general.file_type")
GGUF_FORMATS = {
    "q8_0": (GGMLQuantizationType.Q8_0, LlamaFileType.MOSTLY_Q8_0),
    "q4_0": (GGMLQuantizationType.Q4_0, LlamaFileType.MOSTLY_Q4_0),
    "bf16": (GGMLQuantizationType.BF16, LlamaFileType.MOSTLY_BF16),
    "f16": (GGMLQuantizationType.F16, LlamaFileType.MOSTLY_F16),
}
FORMATS = (*GGUF_FORMATS, HUGGINGFACE, CTRANSLATE2)


def write_gguf(source: Path, target: Path, tensor_type: GGMLQuantizationType, file_type: LlamaFileType) -> None:
    """The same model with its matrices in another type; vectors stay float32."""
    reader = GGUFReader(source)
    writer = GGUFWriter(target, str(reader.fields["general.architecture"].contents()))
    _copy_metadata(reader, writer)
    writer.add_file_type(file_type)
    for tensor in reader.tensors:
        _add_tensor(writer, tensor, tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _copy_metadata(reader: GGUFReader, writer: GGUFWriter) -> None:
    for name, field in reader.fields.items():
        if name in WRITTEN_ANEW:
            continue
        kind, *parts = field.types
        element = parts[-1] if kind == GGUFValueType.ARRAY else None
        writer.add_key_value(name, field.contents(), kind, element)


def _add_tensor(writer: GGUFWriter, tensor: ReaderTensor, matrix_type: GGMLQuantizationType) -> None:
    values = dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False)
    if values.ndim == 1:
        writer.add_tensor(tensor.name, values)
        return
    is_low = matrix_type == GGMLQuantizationType.Q4_0 and tensor.name in HEAD_TENSORS
    stored_type = GGMLQuantizationType.Q8_0 if is_low else matrix_type
    writer.add_tensor(tensor.name, quantize(values, stored_type), raw_dtype=stored_type)


def write_huggingface(source: Path, folder: Path) -> None:
    """A folder as a model's publisher would offer it."""
    model = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.bfloat16)
    del model.config.quantization_config  # the weights are plain numbers by now
    cast(Any, model).hf_quantizer = None
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name).save_pretrained(folder)


def write_ctranslate2(huggingface: Path, folder: Path) -> None:
    """CTranslate2's own format, by its converter."""
    module = "ctranslate2.converters.transformers"
    arguments = ["--model", str(huggingface), "--output_dir", str(folder), "--quantization", "int8"]
    subprocess.run([sys.executable, "-m", module, *arguments], check=True)


def make(source: Path, folder: Path, name: str) -> Path:
    """One form; what is there already stays."""
    if name in GGUF_FORMATS:
        target = folder / f"{name}.gguf"
        if not target.exists():
            write_gguf(source, target, *GGUF_FORMATS[name])
        return target
    huggingface = folder / HUGGINGFACE
    if not huggingface.exists():
        write_huggingface(source, huggingface)
    if name == HUGGINGFACE:
        return huggingface
    target = folder / "ctranslate2-int8"
    if not target.exists():
        write_ctranslate2(huggingface, target)
    return target


def size_of(path: Path) -> int:
    """Bytes of a file, or of all files in a folder."""
    return path.stat().st_size if path.is_file() else sum(file.stat().st_size for file in path.iterdir())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=FORMATS)
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    for name in arguments.formats:
        path = make(arguments.source, arguments.folder, name)
        print(f"{path}: {size_of(path) / 1e6:,.0f} MB")


if __name__ == "__main__":
    main()
