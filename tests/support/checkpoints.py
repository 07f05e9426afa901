"""Tiny checkpoints for tests: a two-layer Llama with random weights, as a Hugging Face folder or a GGUF file.

Written with the official `safetensors` and `gguf` packages, so that our readers are tested against other code.
`raw_gguf` builds GGUF bytes by hand, for files that no proper writer would make.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
VOCAB = 320


def llama_config(**changes: Any) -> dict[str, Any]:
    """The config.json of a tiny Llama; `changes` replace or add keys."""
    return {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "hidden_size": 64,
        "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "head_dim": 16, "max_position_embeddings": 512, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
        "attention_bias": False, "mlp_bias": False, "tie_word_embeddings": False, "vocab_size": VOCAB,
        "bos_token_id": None, "eos_token_id": 2, "pad_token_id": 0, "torch_dtype": "float32",
    } | changes  # fmt: skip


def llama_tensors(config: Mapping[str, Any], seed: int = 0) -> dict[str, Floats]:
    """Random weights by their Hugging Face names; a tied model has no lm_head."""
    random = np.random.default_rng(seed)
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    queries = config["num_attention_heads"] * config["head_dim"]
    keys = config["num_key_value_heads"] * config["head_dim"]

    def matrix(rows: int, columns: int) -> Floats:
        return np.asarray(random.standard_normal((rows, columns)) / np.sqrt(columns), np.float32)

    def norm() -> Floats:
        return np.asarray(1 + 0.1 * random.standard_normal(hidden), np.float32)

    tensors = {"model.embed_tokens.weight": matrix(config["vocab_size"], hidden)}
    for layer in range(config["num_hidden_layers"]):
        tensors |= {f"model.layers.{layer}.{name}.weight": values for name, values in {
            "input_layernorm": norm(), "post_attention_layernorm": norm(),
            "self_attn.q_proj": matrix(queries, hidden), "self_attn.k_proj": matrix(keys, hidden),
            "self_attn.v_proj": matrix(keys, hidden), "self_attn.o_proj": matrix(hidden, queries),
            "mlp.gate_proj": matrix(inner, hidden), "mlp.up_proj": matrix(inner, hidden),
            "mlp.down_proj": matrix(hidden, inner),
        }.items()}  # fmt: skip
    tensors["model.norm.weight"] = norm()
    if not config["tie_word_embeddings"]:
        tensors["lm_head.weight"] = matrix(config["vocab_size"], hidden)
    return tensors


@cache
def tokenizer_json() -> str:
    """A byte-level BPE tokenizer of 320 tokens, the three special ones first."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB, special_tokens=list(SPECIAL_TOKENS), show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    text = (
        "The quick brown fox jumps over the lazy dog, and then the dog sleeps in the warm sun of the morning. "
        "A user asks a question; the assistant gives an answer that is short, true and kind. Once upon a time there was"
        " a small language model which could count from one to ten and spell every word it had ever seen. "
    )
    tokenizer.train_from_iterator([text * 4], trainer)
    assert tokenizer.get_vocab_size() == VOCAB
    return str(tokenizer.to_str())


def write_safetensors(path: Path, tensors: Mapping[str, npt.NDArray[Any]], dtype: str = "float32") -> Path:
    """Write float32 tensors as `dtype` ("float32", "float16", "bfloat16"); other arrays as they are."""
    from safetensors.numpy import save

    stored = {
        name: _encode(values, dtype) if values.dtype == np.float32 else values for name, values in tensors.items()
    }
    content = save(stored, {"format": "pt"})
    path.write_bytes(_relabel(content, "U16", "BF16") if dtype == "bfloat16" else content)
    return path


def _encode(values: Floats, dtype: str) -> npt.NDArray[Any]:
    """Values as stored; bfloat16 as bit patterns, cut and not rounded (see `as_bfloat16`)."""
    if dtype == "bfloat16":
        return (np.ascontiguousarray(values).view(np.uint32) >> 16).astype(np.uint16)
    return values.astype(dtype)


def _relabel(content: bytes, old: str, new: str) -> bytes:
    """A safetensors file with one element type renamed: numpy has no bfloat16 to hand over."""
    end = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:end])
    for name, entry in header.items():
        if name != "__metadata__" and entry["dtype"] == old:
            entry["dtype"] = new
    return safetensors_bytes(header, content[end:])


def safetensors_bytes(header: Any, data: bytes = b"") -> bytes:
    """A safetensors file with any header, sensible or not."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def as_bfloat16(values: Floats) -> Floats:
    """Float32 values that bfloat16 holds exactly (cut, not rounded)."""
    return (np.ascontiguousarray(values).view(np.uint32) & 0xFFFF0000).view(np.float32)


def write_huggingface(
    folder: Path,
    *,
    config: Mapping[str, Any] | None = None,
    tensors: Mapping[str, npt.NDArray[Any]] | None = None,
    dtype: str = "float32",
    shards: int = 1,
    generation: Mapping[str, Any] | None = None,
    tokenizer_config: Mapping[str, Any] | None = None,
) -> Path:
    """A complete model folder; everything not given is the tiny Llama's."""
    folder.mkdir(parents=True, exist_ok=True)
    config = llama_config(torch_dtype=dtype) if config is None else config
    tensors = llama_tensors(config) if tensors is None else tensors
    _write_json(folder / "config.json", config)
    _write_json(folder / "generation_config.json", {"eos_token_id": [2, 0]} if generation is None else generation)
    _write_json(folder / "tokenizer_config.json", _tokenizer_config() if tokenizer_config is None else tokenizer_config)
    (folder / "tokenizer.json").write_text(tokenizer_json(), encoding="utf-8")
    if shards == 1:
        write_safetensors(folder / "model.safetensors", tensors, dtype)
    else:
        _write_shards(folder, tensors, dtype, shards)
    return folder


def _tokenizer_config() -> dict[str, Any]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>",
        "model_max_length": 512, "clean_up_tokenization_spaces": False, "chat_template": CHAT_TEMPLATE,
    }  # fmt: skip


def _write_shards(folder: Path, tensors: Mapping[str, npt.NDArray[Any]], dtype: str, shards: int) -> None:
    names = list(tensors)
    weight_map: dict[str, str] = {}
    for index in range(shards):
        shard = f"model-{index + 1:05d}-of-{shards:05d}.safetensors"
        held = names[index * len(names) // shards : (index + 1) * len(names) // shards]
        write_safetensors(folder / shard, {name: tensors[name] for name in held}, dtype)
        weight_map |= dict.fromkeys(held, shard)
    _write_json(folder / "model.safetensors.index.json", {"metadata": {}, "weight_map": weight_map})


def _write_json(path: Path, data: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(data), encoding="utf-8")


GGUF_LAYER_NAMES = {
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip
GGUF_OUTER_NAMES = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
}  # fmt: skip


def write_gguf(
    path: Path,
    *,
    config: Mapping[str, Any] | None = None,
    tensors: Mapping[str, Floats] | None = None,
    weight_type: str = "F32",
    metadata: Mapping[str, Any] | None = None,
) -> Path:
    """The tiny Llama as a GGUF file, matrices quantised to `weight_type`; `metadata` adds keys."""
    from gguf import GGMLQuantizationType, GGUFWriter
    from gguf.quants import quantize

    config = llama_config() if config is None else config
    tensors = llama_tensors(config) if tensors is None else tensors
    writer = GGUFWriter(path, "llama")
    _add_llama_metadata(writer, config)
    add_tokenizer(writer)
    for key, value in (metadata or {}).items():
        writer.add_key_value(key, value, _gguf_kind(value))
    for name, values in tensors.items():
        kind = GGMLQuantizationType[weight_type if values.ndim == 2 else "F32"]
        writer.add_tensor(gguf_name(name), quantize(_gguf_layout(name, values, config), kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def gguf_name(name: str) -> str:
    """The GGUF name of a Llama tensor."""
    stem, suffix = name.rsplit(".", 1)
    if stem in GGUF_OUTER_NAMES:
        return f"{GGUF_OUTER_NAMES[stem]}.{suffix}"
    _, _, layer, rest = stem.split(".", 3)
    return f"blk.{layer}.{GGUF_LAYER_NAMES[rest]}.{suffix}"


def _gguf_layout(name: str, values: Floats, config: Mapping[str, Any]) -> Floats:
    """GGUF Llama files interleave the two halves of every rotary head."""
    heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}.get(name.split(".")[-2])
    if heads is None:
        return values
    halves = values.reshape(config[heads], 2, -1, values.shape[1])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(values.shape)


def add_gguf_sizes(writer: Any, config: Mapping[str, Any]) -> None:
    """The metadata keys that every family has."""
    writer.add_type("model")
    writer.add_vocab_size(config["vocab_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])


def _add_llama_metadata(writer: Any, config: Mapping[str, Any]) -> None:
    add_gguf_sizes(writer, config)
    writer.add_name("tiny")
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_quantization_version(2)


def add_tokenizer(writer: Any) -> None:
    """The tiny tokenizer and its chat template as GGUF metadata."""
    model = json.loads(tokenizer_json())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([3] * len(SPECIAL_TOKENS) + [1] * (len(tokens) - len(SPECIAL_TOKENS)))
    writer.add_token_merges(merges)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(0)
    writer.add_add_bos_token(False)
    writer.add_chat_template(CHAT_TEMPLATE)


def _gguf_kind(value: Any) -> Any:
    from gguf import GGUFValueType

    return GGUFValueType.get_type(value)


U32, STRING, ARRAY = 4, 8, 9
RawTensor = tuple[bytes, Sequence[int], int, int]  # name, dimensions (fastest first), type number, offset


def raw_gguf(
    *,
    magic: bytes = b"GGUF",
    version: int = 3,
    keys: Sequence[bytes] = (),
    tensors: Sequence[RawTensor] = (),
    key_count: int | None = None,
    tensor_count: int | None = None,
    data: bytes = b"",
    alignment: int = 32,
) -> bytes:
    """GGUF bytes by hand: `keys` are finished entries (see `raw_key`), counts may be false, `data` is aligned."""
    parts = [magic, struct.pack("<I", version)]
    counts = (len(tensors) if tensor_count is None else tensor_count, len(keys) if key_count is None else key_count)
    parts += [struct.pack("<QQ", *counts), *keys]
    for name, dims, kind, offset in tensors:
        parts += [raw_string(name), struct.pack(f"<I{len(dims)}Q", len(dims), *dims), struct.pack("<IQ", kind, offset)]
    header = b"".join(parts)
    return header + (bytes(-len(header) % alignment) + data if data else b"")


def raw_string(text: bytes, length: int | None = None) -> bytes:
    """A GGUF string, with a false length if one is given."""
    return struct.pack("<Q", len(text) if length is None else length) + text


def raw_key(key: bytes, kind: int, value: bytes) -> bytes:
    """A metadata entry of any value type and any bytes."""
    return raw_string(key) + struct.pack("<I", kind) + value


def raw_array(kind: int, count: int, items: bytes = b"") -> bytes:
    """The value of an array entry."""
    return struct.pack("<IQ", kind, count) + items
