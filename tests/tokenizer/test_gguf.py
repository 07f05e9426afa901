from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as FastTokenizer

from support.tokenizers import byte_level_json, byte_level_metadata, spm_json, spm_metadata, with_splits
from topg.errors import CheckpointError, UnsupportedModelError
from topg.tokenizer.gguf import rebuild
from topg.tokenizer.pretokenizers import PRE_TOKENIZERS

SAMPLES = [
    "the quick brown fox", "  leading and trailing  ", "a\n\n\nb\r\n\tc", "don't WE'LL you've", "12 3456789 ½ ٣٤",
    "über naïve e\u0301 ÀÉ ǅ", "你好，世界。ひらがな カタカナ 한국어", "🙂👨‍👩‍👧!?", "x = {'a': [1, 2]}  # ok",
    "CamelCaseWords and_snake",
]  # fmt: skip
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


def rebuilt(metadata: dict[str, Any]) -> FastTokenizer:
    return FastTokenizer.from_str(rebuild(metadata))


def ids(tokenizer: FastTokenizer, text: str) -> list[int]:
    return list(tokenizer.encode(text, add_special_tokens=False).ids)


@given(st.text(max_size=60) | st.sampled_from(SAMPLES))
def test_byte_level_ids_equal_the_original(text: str) -> None:
    original = FastTokenizer.from_str(byte_level_json())
    assert ids(rebuilt(byte_level_metadata()), text) == ids(original, text)


@pytest.mark.parametrize("prefix_space", [True, False])
@given(st.text(max_size=60) | st.text("thean ▁<tag>s\n", max_size=40))
def test_spm_ids_equal_the_original(prefix_space: bool, text: str) -> None:
    original = FastTokenizer.from_str(spm_json(prefix_space))
    made = rebuilt(spm_metadata(add_space_prefix=prefix_space))
    assert ids(made, text) == ids(original, text)
    assert made.decode(ids(made, text)) == original.decode(ids(original, text))


def test_spm_file_without_the_flag_adds_a_space_prefix() -> None:
    assert ids(rebuilt(spm_metadata()), "the") == ids(FastTokenizer.from_str(spm_json(prefix_space=True)), "the")


@pytest.mark.parametrize(
    ("pre", "patterns"),
    [
        ("smollm", [r"\p{N}", GPT2]),
        ("falcon", [r"[\p{P}$+<=>^~|`]+", GPT2, "[0-9][0-9][0-9]"]),
        ("deepseek-coder", [r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+", r"\p{N}"]),
    ],
)
@pytest.mark.parametrize("text", SAMPLES)
def test_words_are_cut_by_the_named_expressions(pre: str, patterns: list[str], text: str) -> None:
    assert ids(rebuilt(byte_level_metadata(pre=pre)), text) == ids(with_splits(byte_level_json(), *patterns), text)


@pytest.mark.parametrize(
    ("pre", "text", "words"),
    [
        ("llama-bpe", "I'LL pay 12345\n\n  now", ["I", "'LL", " pay", " ", "123", "45", "\n\n", " ", " now"]),
        ("qwen2", "I'LL pay 123\n\n  now", ["I", "'LL", " pay", " ", "1", "2", "3", "\n\n", " ", " now"]),
        ("gpt-2", "I'll pay 12345  now", ["I", "'ll", " pay", " 12345", " ", " now"]),
        ("smollm", "pay 123", ["pay", " ", "1", "2", "3"]),
        ("tekken", "CamelCase 12/\n", ["Camel", "Case", " ", "1", "2", "/\n"]),
        ("gpt-4o", "WE'LL see 1234", ["WE'LL", " see", " ", "123", "4"]),
        ("default", "a 1234, b", ["a", " ", "123", "4", ",", " b"]),
        ("deepseek-llm", "Hello world\n123 你好", ["Hello", " world", "\n", "123", " ", "你好"]),
    ],
)
def test_words_of_published_kinds(pre: str, text: str, words: list[str]) -> None:
    pre_tokenizer = rebuilt(byte_level_metadata(pre=pre)).pre_tokenizer
    assert pre_tokenizer is not None
    assert [text[start:end] for _, (start, end) in pre_tokenizer.pre_tokenize_str(text)] == words


@pytest.mark.parametrize("pre", sorted(PRE_TOKENIZERS))
@pytest.mark.parametrize("text", SAMPLES)
def test_every_kind_keeps_the_text(pre: str, text: str) -> None:
    tokenizer = rebuilt(byte_level_metadata(pre=pre))
    normalizer = tokenizer.normalizer
    expected = normalizer.normalize_str(text) if normalizer else text
    assert tokenizer.decode(ids(tokenizer, text)) == expected


def test_whole_words_are_taken_where_the_kind_says_so() -> None:
    metadata = byte_level_metadata()
    metadata["tokenizer.ggml.tokens"] = [*metadata["tokenizer.ggml.tokens"], "zq"]
    metadata["tokenizer.ggml.token_type"] = [*metadata["tokenizer.ggml.token_type"], 1]
    whole = len(metadata["tokenizer.ggml.tokens"]) - 1
    assert ids(rebuilt(metadata | {"tokenizer.ggml.pre": "llama-bpe"}), "zq") == [whole]
    assert ids(rebuilt(metadata), "zq") != [whole]


def test_control_tokens_are_special_and_defined_ones_are_not() -> None:
    added = json.loads(rebuild(spm_metadata()))["added_tokens"]
    assert {token["content"]: token["special"] for token in added} == {
        "<unk>": True, "<s>": True, "</s>": True, "<tag>": False,
    }  # fmt: skip
    assert not any(token["normalized"] for token in added)


def test_defined_tokens_with_spaces_are_found_in_the_text() -> None:
    metadata = spm_metadata(add_space_prefix=False)
    metadata["tokenizer.ggml.tokens"] = [*metadata["tokenizer.ggml.tokens"], "x▁▁y"]
    metadata["tokenizer.ggml.token_type"] = [*metadata["tokenizer.ggml.token_type"], 4]
    metadata["tokenizer.ggml.scores"] = [*metadata["tokenizer.ggml.scores"], -1000.0]
    tokenizer = rebuilt(metadata)
    whole = len(metadata["tokenizer.ggml.tokens"]) - 1
    assert ids(tokenizer, "x  y") == [whole]
    assert tokenizer.decode([whole]) == "x  y"


@pytest.mark.parametrize(("changes", "words"), [({"model": "bert"}, "gpt2, llama"), ({"pre": "brand-new"}, "smollm")])
def test_unknown_kinds_are_refused_with_the_known_ones(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(UnsupportedModelError, match=words):
        rebuild(byte_level_metadata(**changes))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"tokens": None}, "tokens"),
        ({"tokens": []}, "empty"),
        ({"merges": None}, "merges"),
        ({"merges": ["q zzz"]}, r"merges\[0\]"),
        ({"merges": ["nospace"]}, r"merges\[0\]"),
        ({"token_type": [1, 1]}, "2 entries"),
        ({"add_space_prefix": 1}, "add_space_prefix"),
    ],
)
def test_byte_level_parts_that_do_not_fit(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(CheckpointError, match=words):
        rebuild(byte_level_metadata(**changes))


def _replaced(name: str, index: int, value: Any) -> dict[str, Any]:
    values = list(spm_metadata()[f"tokenizer.ggml.{name}"])
    values[index] = value
    return {name: values}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (_replaced("tokens", 300, "<s>"), "twice"),
        (_replaced("tokens", 300, 5), r"tokens\[300\]"),
        (_replaced("tokens", 10, "odd"), "255 of the 256"),
        (_replaced("token_type", 4, 9), r"token_type\[4\] is 9"),
        ({"scores": None}, "scores"),
        ({"scores": [0.0]}, "1 entries"),
        ({"unknown_token_id": 9999}, "unknown_token_id"),
    ],
)
def test_spm_parts_that_do_not_fit(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(CheckpointError, match=words):
        rebuild(spm_metadata(**changes))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"scores": [float("nan")] * len(spm_metadata()["tokenizer.ggml.tokens"])}, r"scores\[0\] is nan"),
        ({"scores": [float("inf")] * len(spm_metadata()["tokenizer.ggml.tokens"])}, r"scores\[0\] is inf"),
        ({"scores": ["x"] * len(spm_metadata()["tokenizer.ggml.tokens"])}, r"scores\[0\]"),
        ({"scores": 5}, "scores must be a list"),
        ({"token_type": ["x"] * len(spm_metadata()["tokenizer.ggml.tokens"])}, r"token_type\[0\]"),
        ({"token_type": 5}, "token_type must be a list"),
        ({"tokens": ["", "a"], "token_type": [1, 1]}, r"tokens\[0\] is empty"),
        ({"tokens": 5}, "tokens must be a list"),
    ],
)
def test_metadata_of_the_wrong_kind_is_refused_by_name(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(CheckpointError, match=words):
        rebuild(spm_metadata(**changes))


def test_a_pre_tokenizer_that_is_no_text_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match=r"tokenizer\.ggml\.pre"):
        rebuild(byte_level_metadata(pre=["gpt-2"]))
