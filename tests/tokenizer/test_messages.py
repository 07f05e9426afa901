from __future__ import annotations

from typing import Any

import pytest

from topg.errors import RequestError
from topg.tokenizer.messages import check_messages

IMAGE = {"type": "image_url", "image_url": {"url": "data:"}}


def test_text_parts_are_joined_by_line_feeds() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "input_text", "text": "b"}]
    assert check_messages([{"role": "user", "content": parts}]) == [{"role": "user", "content": "a\nb"}]


def test_other_keys_and_unknown_roles_go_to_the_template() -> None:
    message = {"role": "wizard", "content": "a", "name": "Merlin"}
    assert check_messages([message]) == [message]


def test_message_with_tool_calls_needs_no_content() -> None:
    calls = [{"id": "1", "function": {"name": "f", "arguments": "{}"}}]
    assert check_messages([{"role": "assistant", "content": None, "tool_calls": calls}])[0]["content"] == ""


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([], "empty"),
        ("hi", "list"),
        (None, "list"),
        (["hi"], r"messages\[0\]"),
        ([{"content": "a"}], "no role"),
        ([{"role": "", "content": "a"}], "role"),
        ([{"role": 3, "content": "a"}], "role"),
        ([{"role": "user"}], "content"),
        ([{"role": "user", "content": None}], "content"),
        ([{"role": "user", "content": 7}], "content"),
        ([{"role": "user", "content": ["a"]}], r"content\[0\]"),
        ([{"role": "user", "content": [IMAGE]}], "image_url"),
        ([{"role": "user", "content": [{"type": "text"}]}], r"content\[0\]\.text"),
        ([{"role": "assistant", "content": "a", "tool_calls": "f"}], r"messages\[0\]\.tool_calls must be a list"),
        ([{"role": "assistant", "content": "a", "tool_calls": {"a": 1}}], r"\.tool_calls must be a list"),
        ([{"role": "assistant", "content": "a", "tool_calls": [1]}], r"\.tool_calls\[0\] must be an object"),
        ([{"role": "assistant", "tool_calls": [{"function": "f"}]}], r"\.tool_calls\[0\]\.function"),
    ],
)
def test_malformed_messages_are_refused(messages: Any, words: str) -> None:
    with pytest.raises(RequestError, match=words) as caught:
        check_messages(messages)
    assert caught.value.param == "messages"
