from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from topg.errors import RequestError
from topg.tokenizer.stop_strings import StopMatcher


def run(stops: list[str], pieces: list[str], include_stop: bool = False) -> tuple[str, str | None]:
    """All text that comes out, and the stop string that ended it."""
    matcher = StopMatcher(stops, include_stop)
    text = "".join(matcher.push(piece)[0] for piece in pieces)
    return text + matcher.flush(), matcher.matched


@pytest.mark.parametrize(
    ("stops", "pieces", "text", "matched"),
    [
        (["cd"], ["ab", "cd", "ef"], "ab", "cd"),
        (["bc"], ["ab", "cd"], "a", "bc"),
        (["two", "one"], ["one two one two"], "", "one"),
        (["fg", "cd"], ["abcdefgh"], "ab", "cd"),
        (["b", "abc"], ["a", "b", "c"], "", "abc"),
        (["b", "abc"], ["a", "b", "x"], "a", "b"),
        (["b", "abc"], ["a", "b"], "a", "b"),
        (["mmn"], ["mm", "mn", "mo"], "m", "mmn"),
        (["xyz"], ["tail ", "x", "y"], "tail xy", None),
        (["\n\n"], ["a\n", "b\n", "\nc"], "a\nb", "\n\n"),
        ([], ["ab"], "ab", None),
    ],
)
def test_cut(stops: list[str], pieces: list[str], text: str, matched: str | None) -> None:
    assert run(stops, pieces) == (text, matched)


def test_held_text_is_sent_once_it_cannot_become_a_stop_string() -> None:
    matcher = StopMatcher(["xyz"])
    assert matcher.push("ax") == ("a", False)
    assert matcher.push("y") == ("", False)
    assert matcher.push("!") == ("xy!", False)


def test_stop_string_is_kept_when_asked_for() -> None:
    assert run(["cd"], ["abc", "def"], include_stop=True) == ("abcd", "cd")


def test_nothing_comes_after_a_stop() -> None:
    matcher = StopMatcher(["b"])
    assert matcher.push("abc") == ("a", True)
    assert matcher.push("def") == ("", True)
    assert matcher.flush() == ""


@given(
    st.lists(st.text("ab", min_size=1, max_size=4), max_size=3),
    st.lists(st.text("abc", max_size=4), max_size=8),
    st.booleans(),
)
def test_result_does_not_depend_on_the_pieces(stops: list[str], pieces: list[str], include_stop: bool) -> None:
    whole = "".join(pieces)
    starts = [(whole.find(stop), len(stop), stop) for stop in stops if stop in whole]
    expected = (whole, None)
    if starts:
        start, length, stop = min(starts)
        expected = (whole[: start + (length if include_stop else 0)], stop)
    assert run(stops, pieces, include_stop) == expected


def test_empty_stop_string_is_refused() -> None:
    with pytest.raises(RequestError, match="at least one character"):
        StopMatcher(["a", ""])
