"""Small tokenizers of the two families, as a tokenizer.json and as the metadata of a GGUF file.

The byte-level one is trained by the `tokenizers` library; the SPM-like one is put together from that library's parts.
Neither uses the code under test.
"""

from __future__ import annotations

import json
from functools import cache
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

BYTE_SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
SPM_SPECIALS = ("<unk>", "<s>", "</s>")
SPM_USER_DEFINED = "<tag>"
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TEXT = "the quick brown fox jumps over the lazy dog   and then sleeps, don't you think? 123 4567 über naïve 你好 🙂 "
SPM_WORDS = ("▁t", "he", "▁the", "▁a", "an", "▁an", "nd", "▁and", "▁▁", "▁▁▁", "▁▁▁▁", "in", "ing", "▁s", "▁sing")


@cache
def byte_level_json() -> str:
    """GPT-2's kind, 400 tokens, three special ones first."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=330, special_tokens=list(BYTE_SPECIALS), initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )  # fmt: skip
    tokenizer.train_from_iterator([TEXT * 3], trainer)
    return str(tokenizer.to_str())


@cache
def spm_json(prefix_space: bool = True, bos: bool = True) -> str:
    """LLaMA-2's kind: a mark for the space, byte fallback, `<s>` in front; the same tokens as `spm_metadata`."""
    vocabulary = {token: index for index, token in enumerate(_spm_tokens())}
    tokenizer = Tokenizer(
        models.BPE(vocabulary, _spm_merges(vocabulary), unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    replace = normalizers.Replace(" ", "▁")
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), replace] if prefix_space else [replace])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix_space else steps)
    tokenizer.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in SPM_SPECIALS])
    tokenizer.add_tokens([AddedToken(SPM_USER_DEFINED, normalized=False)])
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return str(tokenizer.to_str())


def spm_metadata(**changes: Any) -> dict[str, Any]:
    """What a GGUF file says of the SPM-like tokenizer; `changes` replace keys, None removes one."""
    tokens = _spm_tokens()
    kinds = {"<unk>": 2, "<s>": 3, "</s>": 3, SPM_USER_DEFINED: 4}
    types = [kinds.get(token, 6 if token.startswith("<0x") else 1) for token in tokens]
    return _metadata(changes, {
        "model": "llama", "tokens": tokens, "token_type": types, "scores": [-float(i) for i in range(len(tokens))],
        "bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0,
    })  # fmt: skip


def byte_level_metadata(**changes: Any) -> dict[str, Any]:
    """What a GGUF file says of the byte-level tokenizer; `changes` replace keys, None removes one."""
    model = json.loads(byte_level_json())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    types = [3 if token in BYTE_SPECIALS else 1 for token in tokens]
    return _metadata(changes, {
        "model": "gpt2", "pre": "gpt-2", "tokens": tokens, "token_type": types,
        "merges": [" ".join(pair) for pair in model["merges"]], "eos_token_id": 2, "padding_token_id": 0,
    })  # fmt: skip


def with_splits(tokenizer_json: str, *patterns: str) -> Tokenizer:
    """The byte-level tokenizer with other expressions cutting its words."""
    tokenizer = Tokenizer.from_str(tokenizer_json)
    cuts = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*cuts, pre_tokenizers.ByteLevel(False, use_regex=False)])
    return tokenizer


def _metadata(changes: dict[str, Any], values: dict[str, Any]) -> dict[str, Any]:
    merged = {f"tokenizer.ggml.{name}": value for name, value in (values | changes).items()}
    return {name: value for name, value in merged.items() if value is not None}


def _spm_tokens() -> list[str]:
    letters = ["▁", *"abcdefghijklmnopqrstuvwxyz.,<>|_"]
    return [*SPM_SPECIALS, *(f"<0x{byte:02X}>" for byte in range(256)), SPM_USER_DEFINED, *letters, *SPM_WORDS]


def _spm_merges(vocabulary: dict[str, int]) -> list[tuple[str, str]]:
    """Pairs in the order of the tokens they make."""
    pairs = []
    for token in SPM_WORDS:
        halves = ((token[:at], token[at:]) for at in range(1, len(token)))
        pairs += [(left, right) for left, right in halves if left in vocabulary and right in vocabulary]
    return pairs
