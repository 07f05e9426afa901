"""A GGUF file of a real model's shape with random weights: for speed and memory, where no checkpoint is at hand.

    python bench/make_random_model.py {smollm2-135m,tinyllama-1.1b,llama2-7b} {q8_0,q4_0,f16,bf16} OUT.gguf

Any engine that reads GGUF loads the file.  The text it writes is noise; tokens of its vocabulary are made up.  One
matrix is in memory at a time.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType, GGUFWriter, LlamaFileType, TokenType
from gguf.quants import quant_shape_to_byte_shape, quantize

Bytes = npt.NDArray[np.uint8]

SEED = 1
WEIGHT_DEVIATION = 0.02
BLOCK_COLUMNS = 32  # of Q8_0 and Q4_0
BYTE_TOKENS = 256
SPECIAL_TOKENS = ("<unk>", "<s>", "</s>")


@dataclass(frozen=True)
class Shape:
    """What of a Llama model its speed depends on; `tied` when the embedding is also the head."""

    layers: int
    width: int
    hidden: int
    heads: int
    kv_heads: int
    vocab: int
    context: int
    tied: bool = False

    @property
    def kv_width(self) -> int:
        return self.width // self.heads * self.kv_heads

    def matrices(self) -> Iterator[tuple[str, int, int]]:
        """Name, rows and columns of every matrix, in the order of the file."""
        yield "token_embd.weight", self.vocab, self.width
        if not self.tied:
            yield "output.weight", self.vocab, self.width
        for layer in range(self.layers):
            yield f"blk.{layer}.attn_q.weight", self.width, self.width
            yield f"blk.{layer}.attn_k.weight", self.kv_width, self.width
            yield f"blk.{layer}.attn_v.weight", self.kv_width, self.width
            yield f"blk.{layer}.attn_output.weight", self.width, self.width
            yield f"blk.{layer}.ffn_gate.weight", self.hidden, self.width
            yield f"blk.{layer}.ffn_up.weight", self.hidden, self.width
            yield f"blk.{layer}.ffn_down.weight", self.width, self.hidden

    def norms(self) -> Iterator[str]:
        """Names of the norms, each of `width` weights."""
        yield "output_norm.weight"
        for layer in range(self.layers):
            yield f"blk.{layer}.attn_norm.weight"
            yield f"blk.{layer}.ffn_norm.weight"


SHAPES = {
    "smollm2-135m": Shape(30, 576, 1536, 9, 3, 49_152, 8192, tied=True),
    "tinyllama-1.1b": Shape(22, 2048, 5632, 32, 4, 32_000, 2048 * 2),
    "llama2-7b": Shape(32, 4096, 11_008, 32, 32, 32_000, 4096),
}


@dataclass(frozen=True)
class Format:
    """How matrices are stored, and how rows of random ones are made: (generator, rows, columns) -> bytes per row."""

    tensor_type: GGMLQuantizationType
    file_type: LlamaFileType
    rows: Callable[[np.random.Generator, int, int], Bytes]


def random_q8_0(generator: np.random.Generator, rows: int, columns: int) -> Bytes:
    """Blocks of a float16 scale and 32 int8 codes."""
    codes = generator.integers(-127, 128, (rows, columns // BLOCK_COLUMNS, BLOCK_COLUMNS), np.int8)
    return _rows_of_blocks(WEIGHT_DEVIATION / 73.3, codes.view(np.uint8))  # the codes' own deviation is 73.3


def random_q4_0(generator: np.random.Generator, rows: int, columns: int) -> Bytes:
    """Blocks of a float16 scale and 16 bytes of two codes each."""
    pairs = generator.integers(0, 256, (rows, columns // BLOCK_COLUMNS, BLOCK_COLUMNS // 2), np.uint8)
    return _rows_of_blocks(WEIGHT_DEVIATION / 4.6, pairs)


def _rows_of_blocks(scale: float, codes: Bytes) -> Bytes:
    """The scale before each block of codes [rows, blocks, code bytes]."""
    scales = np.broadcast_to(np.array([scale], np.float16).view(np.uint8), (*codes.shape[:2], 2))
    return np.concatenate([scales, codes], axis=-1).reshape(len(codes), -1)


def _random_floats(tensor_type: GGMLQuantizationType) -> Callable[[np.random.Generator, int, int], Bytes]:
    def rows(generator: np.random.Generator, count: int, columns: int) -> Bytes:
        values = generator.standard_normal((count, columns), np.float32) * np.float32(WEIGHT_DEVIATION)
        return quantize(values, tensor_type).view(np.uint8)

    return rows


FORMATS = {
    "q8_0": Format(GGMLQuantizationType.Q8_0, LlamaFileType.MOSTLY_Q8_0, random_q8_0),
    "q4_0": Format(GGMLQuantizationType.Q4_0, LlamaFileType.MOSTLY_Q4_0, random_q4_0),
    "f16": Format(GGMLQuantizationType.F16, LlamaFileType.MOSTLY_F16, _random_floats(GGMLQuantizationType.F16)),
    "bf16": Format(GGMLQuantizationType.BF16, LlamaFileType.MOSTLY_BF16, _random_floats(GGMLQuantizationType.BF16)),
}


def write_model(shape: Shape, name: str, stored: Format, path: Path) -> None:
    """Write metadata, then every tensor."""
    writer = GGUFWriter(path, "llama")
    _add_settings(writer, shape, name, stored)
    _add_vocabulary(writer, shape.vocab)
    _announce_tensors(writer, shape, stored.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    generator = np.random.default_rng(SEED)
    for _, rows, columns in shape.matrices():
        writer.write_tensor_data(stored.rows(generator, rows, columns))
    for _ in shape.norms():
        writer.write_tensor_data(np.ones(shape.width, np.float32))
    writer.close()


def _add_settings(writer: GGUFWriter, shape: Shape, name: str, stored: Format) -> None:
    writer.add_name(f"random weights, shape of {name}")
    writer.add_block_count(shape.layers)
    writer.add_context_length(shape.context)
    writer.add_embedding_length(shape.width)
    writer.add_feed_forward_length(shape.hidden)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_rope_dimension_count(shape.width // shape.heads)
    writer.add_rope_freq_base(10_000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(shape.vocab)
    writer.add_file_type(stored.file_type)
    writer.add_quantization_version(2)


def _add_vocabulary(writer: GGUFWriter, vocab: int) -> None:
    """Special tokens, all bytes, then words that are numbers."""
    words = vocab - len(SPECIAL_TOKENS) - BYTE_TOKENS
    tokens = [*SPECIAL_TOKENS, *(f"<0x{byte:02X}>" for byte in range(BYTE_TOKENS)), *(f"▁{n}" for n in range(words))]
    kinds = [TokenType.UNKNOWN, TokenType.CONTROL, TokenType.CONTROL]
    kinds += [TokenType.BYTE] * BYTE_TOKENS + [TokenType.NORMAL] * words
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores([0.0] * (len(SPECIAL_TOKENS) + BYTE_TOKENS) + [-float(n) for n in range(words)])
    writer.add_token_types(kinds)
    writer.add_unk_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)


def _announce_tensors(writer: GGUFWriter, shape: Shape, tensor_type: GGMLQuantizationType) -> None:
    """GGUF names all tensors, with their sizes, before the first one's data."""
    for name, rows, columns in shape.matrices():
        row_bytes = int(quant_shape_to_byte_shape((columns,), tensor_type)[0])
        writer.add_tensor_info(name, (rows, row_bytes), np.dtype(np.uint8), rows * row_bytes, tensor_type)
    for name in shape.norms():
        writer.add_tensor_info(name, (shape.width,), np.dtype(np.float32), 4 * shape.width)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("format", choices=FORMATS)
    parser.add_argument("output", type=Path)
    arguments = parser.parse_args()
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    write_model(SHAPES[arguments.shape], arguments.shape, FORMATS[arguments.format], arguments.output)
    print(f"{arguments.output}: {arguments.output.stat().st_size / 1e6:,.0f} MB")


if __name__ == "__main__":
    main()
