"""Files that would abort, panic or mislead the tokenizers library are refused in one sentence."""

from __future__ import annotations

import json
from base64 import b64encode
from typing import Any

import pytest

from support.tokenizers import byte_level_json, spm_json
from topg.errors import CheckpointError, RequestError
from topg.tokenizer.special import SpecialTokens, collect_huggingface
from topg.tokenizer.tokenizer import Tokenizer
from topg.tokenizer.tokenizer_file import read_tokenizer_file

TOKENS = SpecialTokens(bos=None, add_bos=False, eos=(2,), pad=None, unk=None, chat_markers=())
ADDED = {"id": 900, "content": "x", "single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
CATASTROPHE = {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False}
BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}


def changed(**parts: Any) -> str:
    return json.dumps(json.loads(byte_level_json()) | parts)


def replaced(pattern: Any, content: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": pattern, "content": content}


def refused(text: str) -> str:
    with pytest.raises(CheckpointError) as caught:
        Tokenizer(text, TOKENS, None)
    assert "\n" not in str(caught.value) and "Error" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("text", ["{}", "[1]", "null", "no JSON", "[" * 100_000, '{"model": 1, "added_tokens": []}'])
def test_what_is_no_tokenizer_file_is_refused_plainly(text: str) -> None:
    assert "tokenizer.json" in refused(text)


@pytest.mark.parametrize("pattern", [{"String": ""}, {"Regex": ""}])
def test_a_search_for_nothing_is_refused(pattern: Any) -> None:
    assert "empty" in refused(changed(normalizer=replaced(pattern, "x")))


@pytest.mark.parametrize("part", [
    {"normalizer": {"type": "Sequence", "normalizers": [replaced({"String": "a"}, "a" * 1000)] * 3}},
    {"normalizer": {"type": "Sequence", "normalizers": [replaced({"Regex": "a"}, "aa")] * 20}},
    {"normalizer": {"type": "Sequence", "normalizers": [{"type": "NFKC"}, replaced({"String": "a"}, "ﷺ")] * 5}},
    {"normalizer": {"type": "Prepend", "prepend": "a" * 1000}},
    {"normalizer": {"type": "Sequence", "normalizers": [
        {"type": "Sequence", "normalizers": [replaced({"String": "a"}, "a" * 20)]}] * 3}},
    {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [BYTE_LEVEL] * 30}},
    {"decoder": {"type": "Sequence", "decoders": [replaced({"String": "a"}, "a" * 1000), {"type": "Fuse"}]}},
    {"normalizer": {"type": "Precompiled", "precompiled_charsmap": b64encode(bytes(4) + b"a" * 1000).decode()}},
])  # fmt: skip
def test_steps_that_blow_up_a_text_are_refused(part: dict[str, Any]) -> None:
    assert "times" in refused(changed(**part))


def test_ordinary_steps_are_taken() -> None:
    Tokenizer(spm_json(), TOKENS, None)
    steps = [{"type": "NFKC"}, {"type": "Lowercase"}]
    Tokenizer(changed(normalizer={"type": "Sequence", "normalizers": steps}), TOKENS, None)


def test_a_post_processor_may_only_write_tokens_it_lists() -> None:
    text = {"Sequence": {"id": "A", "type_id": 0}}
    begin = {"SpecialToken": {"id": "<x>", "type_id": 0}}
    template = {"type": "TemplateProcessing", "single": [begin, text], "pair": [text, text], "special_tokens": {}}
    assert "<x>" in refused(changed(post_processor=template))


def test_an_expression_that_gives_up_refuses_the_text() -> None:
    source = changed(pre_tokenizer={"type": "Sequence", "pretokenizers": [CATASTROPHE, BYTE_LEVEL]})
    tokenizer = Tokenizer(source, TOKENS, "{{ messages[0].content }}")
    assert tokenizer.encode("fine")
    text = "a" * 30 + " b"
    for encode in (
        lambda: tokenizer.encode(text),
        lambda: tokenizer.encode(text, parse_special=False),
        lambda: tokenizer.encode_chat([{"role": "user", "content": text}]),
    ):
        with pytest.raises(RequestError, match="another model") as caught:
            encode()
        assert caught.value.param == "prompt"


def test_truncation_and_padding_are_left_out_with_a_warning() -> None:
    truncation = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
    padding = {
        "strategy": {"Fixed": 8}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0, "pad_type_id": 0,
        "pad_token": "<|endoftext|>",
    }  # fmt: skip
    source = changed(truncation=truncation, padding=padding)
    plain = Tokenizer(byte_level_json(), TOKENS, None)
    for text in ("a", "the quick brown fox"):
        assert Tokenizer(source, TOKENS, None).encode(text) == plain.encode(text)
    assert [warning.split()[2] for warning in read_tokenizer_file(source).warnings] == ["truncation,", "padding,"]
    assert read_tokenizer_file(byte_level_json()).warnings == ()
    assert collect_huggingface({}, None, None, source, None).bos is None


@pytest.mark.parametrize(
    ("token", "words"),
    [
        (ADDED | {"id": 0}, "has the id 0"),
        (ADDED | {"id": 40}, "has the id 40"),
        (ADDED | {"content": ""}, "has no text"),
        (ADDED | {"content": 5}, "has no text"),
        (ADDED | {"id": -1}, "no token id"),
        (ADDED | {"id": "1"}, "no token id"),
        ("x", "has no text"),
    ],
)
def test_added_tokens_that_cannot_be_are_refused(token: Any, words: str) -> None:
    added = json.loads(byte_level_json())["added_tokens"]
    assert words in refused(changed(added_tokens=[*added, token]))


@pytest.mark.parametrize(("vocabulary", "words"), [({"zz": 5}, "the id 5"), ({"zz": "5"}, "no token id")])
def test_vocabularies_that_cannot_be_are_refused(vocabulary: dict[str, Any], words: str) -> None:
    model = json.loads(byte_level_json())["model"]
    assert words in refused(changed(model=model | {"vocab": model["vocab"] | vocabulary}))
    assert "vocabulary" in refused(changed(model=model | {"vocab": {}}))
