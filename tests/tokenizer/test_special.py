from __future__ import annotations

import json
from typing import Any

import pytest

from support.tokenizers import CHATML, byte_level_json, byte_level_metadata, spm_json, spm_metadata
from topg.errors import CheckpointError, UnsupportedModelError
from topg.tokenizer.gguf import rebuild
from topg.tokenizer.special import SpecialTokens, collect_gguf, collect_huggingface

CONFIG = {"eos_token_id": 2}


def huggingface(
    config: dict[str, Any] | None = None,
    generation: dict[str, Any] | None = None,
    tokenizer: dict[str, Any] | None = None,
    source: str | None = None,
) -> SpecialTokens:
    return collect_huggingface(CONFIG | (config or {}), generation, tokenizer, source or byte_level_json(), CHATML)


@pytest.mark.parametrize(
    ("config", "generation", "tokenizer", "eos"),
    [
        ({"eos_token_id": 2}, None, None, (2,)),
        ({"eos_token_id": 2}, {"eos_token_id": 5}, {"eos_token": "<|im_start|>"}, (1, 2, 5)),
        ({"eos_token_id": [2, 0]}, {"eos_token_id": [5, 2]}, {"eos_token": {"content": "<|im_end|>"}}, (2, 0, 5)),
        ({"eos_token_id": None}, {}, {"eos_token": None}, ()),
        ({"eos_token_id": 0}, {}, {}, (0,)),
    ],
)
def test_end_tokens_are_the_union(config: Any, generation: Any, tokenizer: Any, eos: tuple[int, ...]) -> None:
    assert huggingface(config, generation, tokenizer).eos == eos


@pytest.mark.parametrize("parts", [None, [], {"eos_token_id": 7}])
def test_only_the_config_itself_is_read(parts: Any) -> None:
    assert collect_huggingface({"text_config": parts}, None, None, byte_level_json(), None).eos == ()


def test_chat_markers_are_the_special_tokens_in_the_template() -> None:
    assert huggingface().chat_markers == (1, 2)


def test_begin_token_is_read_off_the_post_processor() -> None:
    tokens = huggingface(tokenizer={"bos_token": "<s>", "add_bos_token": False}, source=spm_json())
    assert (tokens.bos, tokens.add_bos) == (1, True)


@pytest.mark.parametrize(("flag", "expected"), [(True, True), (False, False), (None, False)])
def test_flag_counts_where_no_post_processor_stands(flag: bool | None, expected: bool) -> None:
    tokens = huggingface(tokenizer={"bos_token": "<s>", "add_bos_token": flag}, source=spm_json(bos=False))
    assert (tokens.bos, tokens.add_bos) == (1, expected)


def test_end_token_of_the_post_processor_is_left_out() -> None:
    data = json.loads(spm_json())
    data["post_processor"]["single"].append({"SpecialToken": {"id": "</s>", "type_id": 0}})
    data["post_processor"]["special_tokens"]["</s>"] = {"id": "</s>", "ids": [2], "tokens": ["</s>"]}
    tokens = huggingface(tokenizer={"bos_token": "<s>"}, source=json.dumps(data))
    assert (tokens.bos, tokens.add_bos) == (1, True)


def test_two_tokens_before_the_text_are_refused() -> None:
    data = json.loads(spm_json())
    data["post_processor"]["single"].insert(0, {"SpecialToken": {"id": "<s>", "type_id": 0}})
    with pytest.raises(UnsupportedModelError, match="before every text"):
        huggingface(source=json.dumps(data))


@pytest.mark.parametrize(
    ("config", "tokenizer", "words"),
    [
        ({"eos_token_id": "2"}, {}, "eos_token_id"),
        ({"eos_token_id": True}, {}, "eos_token_id"),
        ({"eos_token_id": -3}, {}, "eos_token_id"),
        ({}, {"eos_token": "<nowhere>"}, "<nowhere>"),
        ({}, {"eos_token": 4}, "eos_token"),
    ],
)
def test_tokens_that_cannot_be_are_refused(config: Any, tokenizer: Any, words: str) -> None:
    with pytest.raises(CheckpointError, match=words):
        huggingface(config, None, tokenizer)


def test_padding_of_minus_one_is_none() -> None:
    assert huggingface({"pad_token_id": -1}).pad is None


@pytest.mark.parametrize(
    ("changes", "add_bos"),
    [({}, True), ({"add_bos_token": False}, False), ({"add_bos_token": True}, True)],
)
def test_spm_file_adds_the_begin_token_unless_it_says_otherwise(changes: Any, add_bos: bool) -> None:
    metadata = spm_metadata(**changes)
    assert collect_gguf(metadata, rebuild(metadata)).add_bos is add_bos


@pytest.mark.parametrize(
    ("changes", "add_bos"),
    [
        ({"bos_token_id": 1}, False),
        ({"bos_token_id": 1, "pre": "llama-bpe"}, True),
        ({"bos_token_id": 1, "pre": "tekken"}, True),
        ({"bos_token_id": 1, "pre": "llama-bpe", "add_bos_token": False}, False),
        ({"pre": "llama-bpe"}, False),
        ({"bos_token_id": 1, "add_bos_token": True}, True),
    ],
)
def test_bpe_file_adds_the_begin_token_by_flag_or_kind(changes: Any, add_bos: bool) -> None:
    metadata = byte_level_metadata(**changes)
    assert collect_gguf(metadata, rebuild(metadata)).add_bos is add_bos


def test_gguf_ends_of_text_turn_and_message_all_count() -> None:
    metadata = byte_level_metadata(eos_token_id=2, eot_token_id=0, eom_token_id=1)
    assert collect_gguf(metadata, rebuild(metadata)).eos == (2, 0, 1)


def test_gguf_spm_defaults_where_ids_are_absent() -> None:
    metadata = spm_metadata(bos_token_id=None, eos_token_id=None, unknown_token_id=None)
    tokens = collect_gguf(metadata, rebuild(metadata))
    assert (tokens.bos, tokens.eos, tokens.unk) == (1, (2,), 0)


@pytest.mark.parametrize("changes", [{"eos_token_id": -5}, {"add_bos_token": True}, {"add_bos_token": 1}])
def test_gguf_values_that_cannot_be_are_refused(changes: Any) -> None:
    metadata = byte_level_metadata(**changes)
    with pytest.raises(CheckpointError):
        collect_gguf(metadata, rebuild(metadata))


def test_json_round_trip() -> None:
    tokens = SpecialTokens(bos=0, add_bos=True, eos=(2, 0), pad=None, unk=3, chat_markers=(1,))
    assert SpecialTokens.from_json(json.loads(json.dumps(tokens.to_json()))) == tokens


@pytest.mark.parametrize("change", [{"bos": -1}, {"eos": ["x"]}, {"add_bos": 1}, {"extra": 1}, {"bos": None}])
def test_damaged_json_is_refused(change: dict[str, Any]) -> None:
    tokens = SpecialTokens(bos=0, add_bos=True, eos=(2,), pad=None, unk=None, chat_markers=())
    with pytest.raises(CheckpointError):
        SpecialTokens.from_json(tokens.to_json() | change)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"add_bos_token": "yes"}, "tokenizer.ggml.add_bos_token"),
        ({"add_bos_token": True}, "no tokenizer.ggml.bos_token_id"),
        ({"eos_token_id": "2"}, "tokenizer.ggml.eos_token_id"),
    ],
)
def test_gguf_keys_are_named(changes: dict[str, Any], words: str) -> None:
    metadata = byte_level_metadata(**changes)
    with pytest.raises(CheckpointError, match=words):
        collect_gguf(metadata, rebuild(metadata))


def test_a_gguf_chat_template_must_be_a_text() -> None:
    metadata = byte_level_metadata() | {"tokenizer.chat_template": 5}
    with pytest.raises(CheckpointError, match=r"tokenizer\.chat_template"):
        collect_gguf(metadata, rebuild(metadata))
