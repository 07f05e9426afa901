"""Suggestions, and texts of others made safe to print."""

from __future__ import annotations

import pytest

from topg.wording import MAX_MESSAGE, did_you_mean, printable


def test_the_nearest_word_is_suggested_and_a_far_one_is_not() -> None:
    assert did_you_mean("genrate", ["pull", "generate"]) == "; did you mean 'generate'?"
    assert did_you_mean("zzz", ["pull", "generate"]) == ""


@pytest.mark.parametrize("text", ["plain words", "Größe 4 µm", "日本語 😀", ""])
def test_ordinary_text_stays(text: str) -> None:
    assert printable(text) == text


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b[31m", r"\x1b[31m"), ("a\r\nb", r"a\r\nb"), ("\u202egnp", r"\u202egnp"), ("\u2066", r"\u2066"),
        ("\x9b", r"\x9b"), ("\x00", r"\x00"), ("\udcff", r"\udcff"), ("\U000e0041", r"\U000e0041"),
    ],
)  # fmt: skip
def test_what_steers_a_terminal_is_written_out(text: str, shown: str) -> None:
    assert printable(text) == shown


@pytest.mark.parametrize("character", ["a", "\x1b"])
def test_a_long_text_loses_its_middle(character: str) -> None:
    shown = printable(f"begin {character * 1_000_000} end")
    assert MAX_MESSAGE - 10 <= len(shown) <= MAX_MESSAGE
    assert shown.startswith("begin ") and shown.endswith(" end") and " ... " in shown
