"""What a chat message may be, checked before a template sees it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from topg.errors import RequestError

PARAM = "messages"
TEXT_PARTS = ("text", "input_text", "output_text")
PART_SEPARATOR = "\n"


def check_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The messages as a template gets them; raises RequestError with param "messages".

    `role` is a text of any kind: whether the model knows it, its template says.  `content` is a text, or a list of
    text parts, which are joined by line feeds; it may be missing only where a message makes tool calls.  Parts that
    are not text (images, audio, files) are refused.  Other keys (`name`, `tool_calls`, ...) go to the template as
    they are.
    """
    if not isinstance(messages, list | tuple):
        raise RequestError(f"messages must be a list of messages, not {type(messages).__name__}", PARAM)
    if not messages:
        raise RequestError("messages is empty; a chat needs at least one message", PARAM)
    return [_check_message(message, f"messages[{index}]") for index, message in enumerate(messages)]


def _check_message(message: Any, where: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise RequestError(f"{where} must be an object with role and content, not {type(message).__name__}", PARAM)
    if "role" not in message:
        raise RequestError(f'{where} has no role; give one, such as "user" or "assistant"', PARAM)
    role = message["role"]
    if not isinstance(role, str) or not role:
        raise RequestError(f"{where}.role must be a text of at least one character, not {role!r}", PARAM)
    return dict(message) | {"content": _content(message, where)}


def _content(message: Mapping[str, Any], where: str) -> str:
    content = message.get("content")
    if isinstance(content, str):
        return content
    if isinstance(content, list | tuple):
        return PART_SEPARATOR.join(_part(part, f"{where}.content[{i}]") for i, part in enumerate(content))
    if content is None and message.get("tool_calls"):
        return ""
    raise RequestError(f"{where}.content must be a text or a list of text parts, not {type(content).__name__}", PARAM)


def _part(part: Any, where: str) -> str:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind is None:
        raise RequestError(f'{where} must be an object with a type, such as {{"type": "text", "text": ...}}', PARAM)
    if kind not in TEXT_PARTS:
        raise RequestError(f"{where} has the type {kind!r}; only text is taken, of the types {TEXT_PARTS}", PARAM)
    text = part.get("text")
    if not isinstance(text, str):
        raise RequestError(f"{where}.text must be a text, not {type(text).__name__}", PARAM)
    return text
