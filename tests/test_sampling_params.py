"""SamplingParams refuses every value out of range, by name, when it is made."""

from __future__ import annotations

import json
import math
import pickle
from copy import copy, deepcopy
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from topg.errors import RequestError
from topg.sampling_params import MAX_BIASES, MAX_STOP_LENGTH, MAX_STOP_TOKENS, MAX_STOPS, SamplingParams

NUMBERS = {
    "temperature": (0, 100),
    "top_p": (0, 1),
    "min_p": (0, 1),
    "repetition_penalty": (0.01, 100),
    "presence_penalty": (-2, 2),
    "frequency_penalty": (-2, 2),
}
COUNTS = {
    "top_k": (-1, 2**31 - 1),
    "seed": (0, 2**64 - 1),
    "min_tokens": (0, 2**31 - 1),
    "max_tokens": (1, 2**31 - 1),
    "logprobs": (0, 20),
}
NOT_NUMBERS: tuple[Any, ...] = (math.nan, math.inf, -math.inf, "1", True, [1], 1j)


def refused(name: str, value: object) -> str:
    with pytest.raises(RequestError) as caught:
        SamplingParams(**{name: value})  # type: ignore[arg-type]
    assert caught.value.param == name
    return str(caught.value)


@pytest.mark.parametrize(("name", "limits"), [*NUMBERS.items(), *COUNTS.items()])
def test_limits_are_allowed_and_values_beyond_them_are_not(name: str, limits: tuple[float, float]) -> None:
    low, high = limits
    for value in limits:
        extra = {"max_tokens": 2**31 - 1} if name == "min_tokens" else {}
        assert getattr(SamplingParams(**{name: value}, **extra), name) == value  # type: ignore[arg-type]
    for value in (low - 1, high + 1):
        message = refused(name, value)
        assert repr(value) in message and name in message and "allowed" in message


@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize("value", [*NOT_NUMBERS, None], ids=repr)
def test_numbers_take_only_finite_numbers(name: str, value: object) -> None:
    refused(name, value)


@pytest.mark.parametrize("name", COUNTS)
@pytest.mark.parametrize("value", [*NOT_NUMBERS, 1.0], ids=repr)
def test_counts_take_only_whole_numbers(name: str, value: object) -> None:
    refused(name, value)


@pytest.mark.parametrize("name", ["ignore_eos", "include_stop_str_in_output"])
@pytest.mark.parametrize("value", [0, 1, "yes", None], ids=repr)
def test_flags_take_only_booleans(name: str, value: object) -> None:
    refused(name, value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("logit_bias", {1: 100.5}),
        ("logit_bias", {1: math.nan}),
        ("logit_bias", {"1": 1.0}),
        ("logit_bias", {-1: 1.0}),
        ("logit_bias", [(1, 1.0)]),
        ("logit_bias", dict.fromkeys(range(MAX_BIASES + 1), 1.0)),
        ("stop", ""),
        ("stop", [""]),
        ("stop", [1]),
        ("stop", 1),
        ("stop", None),
        ("stop", "x" * (MAX_STOP_LENGTH + 1)),
        ("stop", ["x"] * (MAX_STOPS + 1)),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", [True]),
        ("stop_token_ids", "12"),
        ("stop_token_ids", list(range(MAX_STOP_TOKENS + 1))),
    ],
    ids=lambda value: repr(value)[:30],
)
def test_lists_are_bounded_and_typed(name: str, value: object) -> None:
    assert len(refused(name, value)) < 300, "a message never repeats a huge value"


def test_a_stop_string_may_stand_alone() -> None:
    assert SamplingParams(stop="end").stops == ("end",)
    assert SamplingParams(stop=["a", "b"]).stops == ("a", "b")


def test_min_tokens_may_not_exceed_max_tokens() -> None:
    assert "max_tokens, which is 2" in refused_pair(min_tokens=3, max_tokens=2)


def refused_pair(**values: int) -> str:
    with pytest.raises(RequestError) as caught:
        SamplingParams(**values)  # type: ignore[arg-type]
    return str(caught.value)


def test_token_ids_are_checked_against_the_vocabulary() -> None:
    SamplingParams(logit_bias={9: 1.0}, stop_token_ids=[9]).check_tokens(10)
    for params, name in (
        (SamplingParams(logit_bias={10: 1.0}), "logit_bias"),
        (SamplingParams(stop_token_ids=[10]), "stop_token_ids"),
    ):
        with pytest.raises(RequestError, match="0 to 9") as caught:
            params.check_tokens(10)
        assert caught.value.param == name


def test_params_are_values() -> None:
    biases = {1: 2.0}
    params = SamplingParams(logit_bias=biases, stop=["a"], stop_token_ids=[3, 3])
    biases[1] = 5.0
    assert params.logit_bias == {1: 2.0}, "the caller's mapping was copied"
    assert params.stop_token_ids == (3,)
    assert params == SamplingParams(**params.to_json()) == deepcopy(params)
    assert hash(params) == hash(SamplingParams(logit_bias={1: 2.0}, stop=("a",), stop_token_ids=(3,)))


def test_biases_cannot_be_changed_afterwards() -> None:
    given = {5: 1.0}
    params = SamplingParams(logit_bias=given)
    given[5] = 2.0
    assert params.logit_bias == {5: 1.0}
    with pytest.raises(TypeError):
        params.logit_bias[5] = 3.0  # type: ignore[index]


def test_copies_and_pickles_are_equal() -> None:
    params = SamplingParams(logit_bias={5: 1.0}, stop=["a"], stop_token_ids=[7], seed=3)
    assert deepcopy(params) == pickle.loads(pickle.dumps(params)) == replace(params) == params  # noqa: S301  own bytes
    assert hash(copy(params)) == hash(params)
    assert json.loads(json.dumps(params.to_json()))["logit_bias"] == {"5": 1.0}


@pytest.mark.parametrize("name", [*NUMBERS, *COUNTS])
@pytest.mark.parametrize("value", [10**400, -(10**400), 10**5000], ids=["large", "negative", "larger"])
def test_huge_numbers_are_refused_by_name(name: str, value: int) -> None:
    assert len(refused(name, value)) < 300


def test_huge_numbers_in_lists_are_refused_by_name() -> None:
    for value in ({1: 10**400}, {10**400: 1}, {10**5000: 1}, {1: 10**5000}):
        refused("logit_bias", value)
    refused("stop_token_ids", [10**5000])


def test_a_bias_that_is_no_number_is_named_by_its_token() -> None:
    assert "logit_bias[7] is nan" in refused("logit_bias", {3: 1.0, 7: math.nan})


def test_numbers_of_numpy_become_those_of_python() -> None:
    params = SamplingParams(
        temperature=np.float32(0.5), top_k=np.int32(3), seed=np.uint64(2**63), logit_bias={np.int64(4): np.float32(1)},
        stop_token_ids=np.array([7, 7, 8]),
    )  # fmt: skip
    assert params == SamplingParams(temperature=0.5, top_k=3, seed=2**63, logit_bias={4: 1.0}, stop_token_ids=[7, 8])
    json.dumps(params.to_json())
    for value in (np.bool_(True), np.array([1, 2])):
        refused("top_k", value)
        refused("temperature", value)
