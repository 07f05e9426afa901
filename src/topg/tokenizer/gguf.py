"""The tokenizer inside a GGUF file, rebuilt as a tokenizer.json.

GGUF keeps the parts (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, "Tokenizer"): the tokens with a type
each, and either merges (`gpt2`: byte-level BPE) or scores (`llama`: SentencePiece BPE).  What the parts do not say, the
kind's conventions do: pretokenizers.py for byte-level BPE, `_spm_parts` here.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass
from enum import IntEnum
from math import isfinite
from numbers import Integral, Real
from typing import Any

from topg.errors import CheckpointError, UnsupportedModelError
from topg.tokenizer.decoding import byte_level_alphabet
from topg.tokenizer.pretokenizers import PreTokenizer, pre_tokenizer

PREFIX = "tokenizer.ggml."
MODELS = ("gpt2", "llama")
SPACE_MARK = "▁"
BYTES = 256


class TokenType(IntEnum):
    """What a token is for, as GGUF numbers it."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True)
class _Vocabulary:
    """Tokens by id with their types; every text occurs once."""

    tokens: Sequence[str]
    types: Sequence[int]

    @property
    def ids(self) -> dict[str, int]:
        return {token: index for index, token in enumerate(self.tokens)}

    def of_type(self, *types: TokenType) -> list[int]:
        return [index for index, kind in enumerate(self.types) if kind in types]

    def added(self) -> list[dict[str, Any]]:
        """Tokens found in a text before anything else: special ones, and the ones somebody defined."""
        kinds = (TokenType.CONTROL, TokenType.UNKNOWN, TokenType.USER_DEFINED)
        rules = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
        return [
            {"id": index, "content": self.tokens[index], "special": self.types[index] != TokenType.USER_DEFINED} | rules
            for index in self.of_type(*kinds)
        ]


def rebuild(metadata: Mapping[str, Any]) -> str:
    """The text of a tokenizer.json that gives the ids of the tokenizer a GGUF file holds.

    `metadata` are the file's keys and values.  Raises UnsupportedModelError for another kind of tokenizer or an
    unknown pre-tokenizer, CheckpointError for parts that are missing or do not fit each other.
    """
    model = metadata.get(PREFIX + "model")
    if model not in MODELS:
        raise UnsupportedModelError(
            f"tokenizer.ggml.model is {model!r:.60}; supported are {', '.join(MODELS)}. "
            "Convert the model's original Hugging Face folder instead"
        )
    parts = _spm_parts(metadata) if model == "llama" else _byte_level_parts(metadata)
    whole = {"version": "1.0", "truncation": None, "padding": None} | parts
    return json.dumps(whole, ensure_ascii=False, separators=(",", ":"))


def adds_bos_by_default(metadata: Mapping[str, Any]) -> bool:
    """Whether prompts begin with the begin token where a file does not say: by the kind of tokenizer."""
    if metadata.get(PREFIX + "model") == "llama":
        return True
    return pre_tokenizer(metadata.get(PREFIX + "pre", "default")).add_bos


def _byte_level_parts(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """GPT-2's kind: words cut by expressions, bytes written as characters, merges by rank."""
    rules = pre_tokenizer(metadata.get(PREFIX + "pre", "default"))
    vocabulary = _vocabulary(metadata)
    ids = vocabulary.ids
    prefix_space = _flag(metadata, "add_space_prefix", False)
    model = _bpe(ids, _merges(metadata, ids)) | {"ignore_merges": rules.ignore_merges}
    return {
        "added_tokens": vocabulary.added(),
        "normalizer": {"type": "NFC"} if rules.nfc else None,
        "pre_tokenizer": _splits(rules, prefix_space),
        "post_processor": _byte_level(prefix_space),
        "decoder": _byte_level(prefix_space),
        "model": model,
    }


def _spm_parts(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """SentencePiece's BPE kind: a mark for the space, bytes for unknown characters, pairs merged by score.

    There is no cutting into words.  Unless `add_space_prefix` says otherwise, a mark goes before every stretch of
    text, and one space is taken off the start of what is decoded.
    """
    prefix_space = _flag(metadata, "add_space_prefix", True)
    vocabulary = _with_plain_spaces(_vocabulary(metadata))
    ids = vocabulary.ids
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE_MARK}
    prepend = [{"type": "Prepend", "prepend": SPACE_MARK}] if prefix_space else []
    strip = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if prefix_space else []
    unmark = {"type": "Replace", "pattern": {"String": SPACE_MARK}, "content": " "}
    model = _bpe(ids, _merges_by_score(vocabulary, _scores(metadata, vocabulary)))
    model |= {"unk_token": _unknown(metadata, vocabulary), "fuse_unk": True, "byte_fallback": _has_bytes(ids)}
    return {
        "added_tokens": vocabulary.added(),
        "normalizer": {"type": "Sequence", "normalizers": [*prepend, replace]},
        "pre_tokenizer": None,
        "post_processor": None,
        "decoder": {"type": "Sequence", "decoders": [unmark, {"type": "ByteFallback"}, {"type": "Fuse"}, *strip]},
        "model": model,
    }


def _bpe(ids: Mapping[str, int], merges: Sequence[tuple[str, str]]) -> dict[str, Any]:
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
        "vocab": ids,
        "merges": merges,
    }


def _byte_level(prefix_space: bool) -> dict[str, Any]:
    """Bytes to characters; the words are cut already."""
    return {"type": "ByteLevel", "add_prefix_space": prefix_space, "trim_offsets": True, "use_regex": False}


def _splits(rules: PreTokenizer, prefix_space: bool) -> dict[str, Any]:
    splits = [
        {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
        for pattern in rules.patterns
    ]
    return {"type": "Sequence", "pretokenizers": [*splits, _byte_level(prefix_space)]}


def _vocabulary(metadata: Mapping[str, Any]) -> _Vocabulary:
    tokens = _texts(metadata, "tokens")
    if not tokens:
        raise CheckpointError("tokenizer.ggml.tokens is empty")
    types = metadata.get(PREFIX + "token_type")
    if types is None:
        types = [TokenType.NORMAL] * len(tokens)
    _check_length("token_type", types, tokens)
    _check_unique(tokens)
    if "" in tokens:
        raise CheckpointError(f"tokenizer.ggml.tokens[{tokens.index('')}] is empty; every token needs a text")
    known = {*map(int, TokenType)}
    for index, kind in enumerate(types):
        if not isinstance(kind, Integral) or kind not in known:
            raise CheckpointError(f"tokenizer.ggml.token_type[{index}] is {kind!r:.60}; the types are {sorted(known)}")
    return _Vocabulary(tokens, [int(kind) for kind in types])


def _texts(metadata: Mapping[str, Any], name: str) -> list[str]:
    values = metadata.get(PREFIX + name)
    if values is None:
        raise CheckpointError(f"the GGUF file has no tokenizer.ggml.{name}; it holds no usable tokenizer")
    if not isinstance(values, Iterable) or isinstance(values, str):
        raise CheckpointError(f"tokenizer.ggml.{name} must be a list of texts, not {type(values).__name__}")
    texts = list(values)
    wrong = next((index for index, text in enumerate(texts) if not isinstance(text, str)), None)
    if wrong is not None:
        raise CheckpointError(f"tokenizer.ggml.{name}[{wrong}] must be a text, not {type(texts[wrong]).__name__}")
    return texts


def _flag(metadata: Mapping[str, Any], name: str, default: bool) -> bool:
    value = metadata.get(PREFIX + name, default)
    if not isinstance(value, bool):
        raise CheckpointError(f"tokenizer.ggml.{name} must be true or false, not {value!r:.60}")
    return value


def _check_length(name: str, values: Any, tokens: Sequence[str]) -> None:
    if not isinstance(values, Sized) or isinstance(values, str):
        raise CheckpointError(f"tokenizer.ggml.{name} must be a list, not {type(values).__name__}")
    if len(values) != len(tokens):
        raise CheckpointError(f"tokenizer.ggml.{name} has {len(values)} entries for {len(tokens)} tokens")


def _check_unique(tokens: Sequence[str]) -> None:
    first: dict[str, int] = {}
    for index, token in enumerate(tokens):
        if first.setdefault(token, index) != index:
            raise CheckpointError(f"tokenizer.ggml.tokens holds {token!r} twice, as {first[token]} and {index}")


def _merges(metadata: Mapping[str, Any], ids: Mapping[str, int]) -> list[tuple[str, str]]:
    """The pairs, best first; a merge is written "left right", and only its left part may begin with a space."""
    pairs = []
    for index, merge in enumerate(_texts(metadata, "merges")):
        at = merge.find(" ", 1)
        left, right = merge[:at], merge[at + 1 :]
        if at < 0 or left not in ids or right not in ids or left + right not in ids:
            raise CheckpointError(f"tokenizer.ggml.merges[{index}] is {merge!r}, which does not join two tokens to one")
        pairs.append((left, right))
    missing = [character for character in byte_level_alphabet() if character not in ids]
    if missing and len(missing) == BYTES:
        raise CheckpointError("tokenizer.ggml.tokens has none of the 256 byte characters of byte-level BPE")
    return pairs


def _scores(metadata: Mapping[str, Any], vocabulary: _Vocabulary) -> Sequence[float]:
    scores = metadata.get(PREFIX + "scores")
    if scores is None:
        raise CheckpointError("the GGUF file has no tokenizer.ggml.scores, which a SentencePiece tokenizer needs")
    _check_length("scores", scores, vocabulary.tokens)
    for index, score in enumerate(scores):
        if not isinstance(score, Real) or not isfinite(score):
            raise CheckpointError(f"tokenizer.ggml.scores[{index}] is {score!r:.60}; every score is a finite number")
    return [float(score) for score in scores]


def _merges_by_score(vocabulary: _Vocabulary, scores: Sequence[float]) -> list[tuple[str, str]]:
    """Every way to make a token of two others, best score first.

    SentencePiece merges the neighbours whose joined text has the best score; ranking the pairs by the score of what
    they make gives the same.  Only ordinary tokens take part: the others never come out of a merge.
    """
    ordinary = vocabulary.of_type(TokenType.NORMAL, TokenType.USER_DEFINED)
    known = {vocabulary.tokens[index] for index in ordinary}
    by_score = sorted(ordinary, key=lambda index: (-scores[index], index))
    return [pair for index in by_score for pair in _halves(vocabulary.tokens[index], known)]


def _halves(token: str, known: set[str]) -> Iterator[tuple[str, str]]:
    for at in range(1, len(token)):
        left, right = token[:at], token[at:]
        if left in known and right in known:
            yield left, right


def _with_plain_spaces(vocabulary: _Vocabulary) -> _Vocabulary:
    """User-defined tokens are looked for in the text itself, so they are written with spaces, not with the mark."""
    tokens = list(vocabulary.tokens)
    taken = set(tokens)
    for index in vocabulary.of_type(TokenType.USER_DEFINED):
        plain = tokens[index].replace(SPACE_MARK, " ")
        if plain not in taken:
            tokens[index] = plain
    return _Vocabulary(tokens, vocabulary.types)


def _unknown(metadata: Mapping[str, Any], vocabulary: _Vocabulary) -> str:
    index = metadata.get(PREFIX + "unknown_token_id", 0)
    if isinstance(index, bool) or not isinstance(index, int) or not 0 <= index < len(vocabulary.tokens):
        raise CheckpointError(
            f"tokenizer.ggml.unknown_token_id is {index!r}; it must be an id from 0 to {len(vocabulary.tokens) - 1}"
        )
    return vocabulary.tokens[index]


def _has_bytes(ids: Mapping[str, int]) -> bool:
    """Whether characters without a token are written as bytes; a file has all 256 of them or none."""
    present = sum(f"<0x{byte:02X}>" in ids for byte in range(BYTES))
    if present not in (0, BYTES):
        raise CheckpointError(f"tokenizer.ggml.tokens has {present} of the 256 byte tokens <0x00> to <0xFF>")
    return present == BYTES
