"""Intake: what is refused, by which name, and what a request holds."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from support.byte_tokenizer import END, USER, byte_tokenizer, ids_of
from topg.errors import PromptTooLongError, RequestError
from topg.sampling_params import DEFAULT_CHAT_TOKENS, DEFAULT_MAX_TOKENS, SamplingParams
from topg.stages.intake import Intake, IntakeLimits

VOCAB = 300


def intake(max_context: int = 1000, bos: int | None = None) -> Intake:
    return Intake(byte_tokenizer(bos=bos), [END], IntakeLimits(max_context, VOCAB))


def refused(prompt: Any, max_context: int = 1000, **params: Any) -> RequestError:
    with pytest.raises(RequestError) as caught:
        intake(max_context).from_prompt(prompt, SamplingParams(**params))
    return caught.value


def test_text_and_ids_become_a_request() -> None:
    params = SamplingParams(max_tokens=5, seed=3, stop_token_ids=[9])
    request = intake().from_prompt("ab", params)
    assert request == intake().from_prompt(ids_of("ab"), params)
    assert request.prompt_tokens == tuple(ids_of("ab"))
    assert (request.max_tokens, request.seed, request.end_tokens) == (5, 3, {END, 9})


def test_ids_are_taken_as_they_are() -> None:
    assert intake(bos=USER).from_prompt("a", SamplingParams()).prompt_tokens == (USER, *ids_of("a"))
    assert intake(bos=USER).from_prompt(ids_of("a"), SamplingParams()).prompt_tokens == tuple(ids_of("a"))


def test_an_empty_prompt_needs_a_begin_token() -> None:
    assert intake(bos=USER).from_prompt("", SamplingParams()).prompt_tokens == (USER,)
    for prompt in ("", []):
        assert refused(prompt).param == "prompt"


@pytest.mark.parametrize("prompt", [None, 5, b"bytes", {"a": 1}, [1.0], ["a"], [True], [-1], [VOCAB], [[1]], "a\ud800"])
def test_prompts_of_the_wrong_kind_are_refused(prompt: Any) -> None:
    assert refused(prompt).param == "prompt"


def test_a_huge_text_is_refused_before_it_is_tokenised() -> None:
    assert isinstance(refused("a" * 10_000, max_context=10), PromptTooLongError)


def test_the_prompt_must_leave_room() -> None:
    assert intake(10).from_prompt("a" * 9, SamplingParams()).max_tokens == 1
    assert "10 tokens" in str(refused("a" * 10, max_context=10))


def test_max_tokens_that_do_not_fit_are_refused_and_the_default_is_cut() -> None:
    assert intake(10).from_prompt("abcd", SamplingParams(max_tokens=6)).max_tokens == 6
    error = refused("abcd", max_context=10, max_tokens=7)
    assert error.param == "max_tokens" and "at most 6" in str(error)
    assert intake(10).from_prompt("abcd", SamplingParams()).max_tokens == 6
    assert intake(1000).from_prompt("abcd", SamplingParams()).max_tokens == DEFAULT_MAX_TOKENS


def test_min_tokens_raise_the_default_or_are_refused() -> None:
    assert intake().from_prompt("a", SamplingParams(min_tokens=400)).max_tokens == 400
    assert refused("a", max_context=10, min_tokens=10).param == "min_tokens"


def test_token_ids_of_params_are_checked() -> None:
    assert refused("a", logit_bias={VOCAB: 1}).param == "logit_bias"
    assert refused("a", stop_token_ids=[VOCAB]).param == "stop_token_ids"


def test_ignoring_end_tokens_keeps_the_stop_tokens() -> None:
    request = intake().from_prompt("a", SamplingParams(ignore_eos=True, stop_token_ids=[9]))
    assert request.end_tokens == {9}


def test_seeds_are_drawn_where_none_is_given() -> None:
    seeds = {intake().from_prompt("a", SamplingParams()).seed for _ in range(20)}
    assert len(seeds) == 20 and max(seeds) < 2**53


def test_chats_go_through_the_template() -> None:
    request = intake().from_messages([{"role": "user", "content": "hi<end>"}], SamplingParams())
    assert request.prompt_tokens == (USER, *ids_of("hi<end>"), END), "content never becomes a special token"


def test_the_default_for_a_chat_is_longer() -> None:
    hello = [{"role": "user", "content": "hello"}]
    assert intake(5000).from_messages(hello, SamplingParams()).max_tokens == DEFAULT_CHAT_TOKENS
    assert intake(10).from_messages(hello, SamplingParams()).max_tokens == 3
    assert intake(5000).from_messages(hello, SamplingParams(min_tokens=2000)).max_tokens == 2000


@pytest.mark.parametrize(
    "messages", [[], "hi", None, [1], [{}], [{"role": "user"}], [{"role": 1, "content": "a"}], {"role": "user"}]
)
def test_malformed_messages_are_refused(messages: Any) -> None:
    with pytest.raises(RequestError) as caught:
        intake().from_messages(messages, SamplingParams())
    assert caught.value.param == "messages"


def test_a_huge_chat_is_refused_before_it_is_rendered() -> None:
    with pytest.raises(PromptTooLongError):
        intake(10).from_messages([{"role": "user", "content": "a" * 10_000}], SamplingParams())
    with pytest.raises(PromptTooLongError):
        intake(10).from_messages([{"role": "user", "content": "a", "name": ["a" * 10_000]}], SamplingParams())


def test_a_chat_that_nests_too_deep_is_refused() -> None:
    deep: list[Any] = []
    for _ in range(10_000):
        deep = [deep]
    with pytest.raises(RequestError, match="deep") as caught:
        intake().from_messages([{"role": "user", "content": "a", "extra": deep}], SamplingParams())
    assert caught.value.param == "messages"


@pytest.mark.parametrize("params", [
    {"logit_bias": dict.fromkeys(range(VOCAB), -100)},
    {"logit_bias": dict.fromkeys(range(1, VOCAB), -100), "min_tokens": 1},
    {"logit_bias": {END: 100}, "min_tokens": 1},
    {"logit_bias": {END: 100, 9: 100}, "stop_token_ids": [9], "min_tokens": 1},
])  # fmt: skip
def test_constraints_that_leave_no_token_are_refused(params: Any) -> None:
    assert refused("a", **params).param == "logit_bias"


def test_constraints_that_leave_one_token_are_taken() -> None:
    intake().from_prompt("a", SamplingParams(logit_bias=dict.fromkeys(range(1, VOCAB), -100)))
    intake().from_prompt("a", SamplingParams(logit_bias={END: 100, 9: 100}, min_tokens=1))
    intake().from_prompt("a", SamplingParams(logit_bias={END: 100}, min_tokens=1, ignore_eos=True))


def test_token_ids_may_be_of_any_integer_type() -> None:
    request = intake().from_prompt([5, np.int32(6), np.int64(7)], SamplingParams())
    assert request.prompt_tokens == (5, 6, 7) and all(type(token) is int for token in request.prompt_tokens)
    assert refused([10**5000]).param == "prompt"
