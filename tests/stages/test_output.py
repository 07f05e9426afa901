"""Output: text never half a character, stop strings at the right place, and every token accounted for."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest

from support.byte_tokenizer import END, byte_tokenizer, ids_of
from topg.sampling import Sampled
from topg.sampling_params import SamplingParams
from topg.stages.compute import StepOutput, TokenEvent
from topg.stages.output import UNREAD_DELTAS, Output, result_of
from topg.stages.queues import BoundedQueue
from topg.types import Delta, FinishReason, GenerationResult, Request

TWO_LINE_FEEDS = 258
FAMILY = "👩‍👩‍👧"  # three characters and two joiners, 18 bytes


def run(
    tokens: Sequence[int], reason: FinishReason = "length", *, read_each: bool = True, error: str | None = None,
    **params: Any,
) -> tuple[list[Delta], GenerationResult]:  # fmt: skip
    """Feed tokens as compute would, until a stop string ends it; returns the deltas and the whole answer."""
    made = SamplingParams(**params)
    request = Request((5,), made, 1000, 0, frozenset({END, *made.stop_token_ids}))
    inbox: BoundedQueue[StepOutput] = BoundedQueue("output", 8)
    output = Output(byte_tokenizer([b"\n\n"]), inbox)
    output.open(7, request)
    deltas: list[Delta] = []
    for index, token in enumerate(tokens):
        last = index == len(tokens) - 1
        sampled = Sampled(token, -0.5, ((token, -0.5), (END, -1.0))) if made.logprobs is not None else Sampled(token)
        inbox.put(StepOutput((TokenEvent(7, sampled, reason if last else None, error if last else None),)))
        ended = output.process()
        if read_each or last or ended:
            delta = output.take(7)
            assert delta is not None
            deltas.append(delta)
        if ended:
            break
    return deltas, result_of(request, deltas)


def text_of(tokens: Sequence[int], **params: Any) -> str:
    deltas, whole = run(tokens, **params)
    assert "".join(delta.text for delta in deltas) == whole.text
    assert all(delta.finish_reason is None for delta in deltas[:-1])
    assert run(tokens, read_each=False, **params)[1] == whole, "how often it is read changes nothing"
    return whole.text


@pytest.mark.parametrize("text", ["plain", "grün", "漢字", FAMILY, f"a{FAMILY}b"])
def test_characters_come_whole(text: str) -> None:
    deltas, _ = run(ids_of(text))
    assert text_of(ids_of(text)) == text
    assert not any("\N{REPLACEMENT CHARACTER}" in delta.text for delta in deltas)


def test_a_character_cut_in_the_middle_ends_the_same_way_in_both_modes() -> None:
    deltas, whole = run(ids_of("a漢")[:-1])
    assert whole.text == "a\N{REPLACEMENT CHARACTER}" == text_of(ids_of("a漢")[:-1])
    assert whole.usage.completion_tokens == 3 and deltas[-1].text == "\N{REPLACEMENT CHARACTER}"


@pytest.mark.parametrize("reason", ["length", "stop"])
def test_a_held_part_of_a_stop_string_is_delivered_at_the_end(reason: FinishReason) -> None:
    tokens = ids_of("abxy") + ([END] if reason == "stop" else [])
    assert text_of(tokens, reason=reason, stop=["xyz"]) == "abxy"
    assert run(tokens, reason, stop=["xyz"])[1].finish_reason == reason


@pytest.mark.parametrize("stop", [["\n"], ["\n\n"], ["\n", "\n\n"], ["\n\n", "\n"]])
def test_the_earliest_stop_in_one_token_counts(stop: list[str]) -> None:
    tokens = [*ids_of("Answer"), TWO_LINE_FEEDS, *ids_of("more")]
    _, whole = run(tokens, stop=stop)
    assert (whole.text, whole.finish_reason) == ("Answer", "stop")
    assert whole.usage.completion_tokens == len(whole.token_ids) == 7
    assert text_of(tokens, stop=stop) == "Answer"


def test_the_order_of_stops_does_not_matter() -> None:
    for stop in (["cd", "bc"], ["bc", "cd"]):
        assert text_of(ids_of("abcdef"), stop=stop) == "a"


def test_a_stop_string_may_be_left_in() -> None:
    assert text_of(ids_of("abcdef"), stop="cd", include_stop_str_in_output=True) == "abcd"


def test_a_stop_string_on_the_last_token_says_stop() -> None:
    assert run(ids_of("abc"), "length", stop="c")[1].finish_reason == "stop"


def test_stop_strings_wait_for_min_tokens() -> None:
    assert text_of(ids_of("abcabc"), stop="b", min_tokens=2) == "abca"
    assert text_of(ids_of("abcabc"), stop="bc", min_tokens=2) == "abca", "text before min_tokens takes part in no match"
    assert text_of(ids_of("abcabc"), stop="b", min_tokens=1) == "a"


def test_end_tokens_are_counted_and_not_shown() -> None:
    _, whole = run([*ids_of("ab"), END], "stop")
    assert (whole.text, whole.finish_reason) == ("ab", "stop")
    assert whole.token_ids == (*ids_of("ab"), END) and whole.usage.completion_tokens == 3


def test_stop_tokens_are_shown_only_when_asked_for() -> None:
    (stop,) = ids_of("!")
    assert text_of([*ids_of("ab"), stop], reason="stop", stop_token_ids=[stop]) == "ab"
    shown = {"stop_token_ids": [stop], "include_stop_str_in_output": True}
    assert text_of([*ids_of("ab"), stop], reason="stop", **shown) == "ab!"


def test_every_token_has_one_logprob_with_its_own_bytes() -> None:
    text = f"a{FAMILY}"
    _, whole = run(ids_of(text), logprobs=1)
    assert whole.logprobs is not None and len(whole.logprobs) == len(whole.token_ids)
    assert b"".join(position.chosen.bytes for position in whole.logprobs) == text.encode()
    assert whole.logprobs[0].chosen.logprob == -0.5
    assert [token.text for token in whole.logprobs[0].top] == ["a", "<end>"]


def test_logprobs_are_none_unless_asked_for() -> None:
    deltas, whole = run(ids_of("ab"))
    assert whole.logprobs is None and all(delta.logprobs is None for delta in deltas)


def test_an_error_is_passed_on() -> None:
    _, whole = run(ids_of("ab"), "error", error="broken")
    assert (whole.finish_reason, whole.error, whole.text) == ("error", "broken", "ab")


def test_usage_comes_with_the_last_delta() -> None:
    deltas, _ = run(ids_of("abc"))
    assert [delta.usage is None for delta in deltas] == [True, True, False]
    assert deltas[-1].usage is not None and deltas[-1].usage.total_tokens == 4


def test_a_slow_reader_gets_everything_in_one_delta() -> None:
    text = "0123456789" * 30
    deltas, whole = run(ids_of(text), read_each=False, logprobs=0)
    assert len(text) > UNREAD_DELTAS and len(deltas) == 1
    assert whole.text == text and whole.logprobs is not None and len(whole.logprobs) == len(text)
    assert math.isclose(sum(position.chosen.logprob for position in whole.logprobs), -0.5 * len(text))


def test_a_closed_answer_tells_its_reader() -> None:
    output = Output(byte_tokenizer(), BoundedQueue("output", 1))
    output.open(1, Request((5,), SamplingParams(), 5, 0, frozenset()))
    assert output.take(1) is None
    output.close(1)
    assert output.take(1) == Delta("", (), finish_reason="abort")
