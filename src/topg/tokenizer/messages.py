"""What a chat message may be, checked before a template sees it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from topg.errors import RequestError

PARAM = "messages"
TEXT_PARTS = ("text", "input_text", "output_text")
PART_SEPARATOR = "\n"
MAX_DEPTH = 50


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


def text_size(value: Any, depth: int = 0) -> int:
    """Characters of all texts in checked messages, keys included; raises RequestError for what nests too deep."""
    if depth > MAX_DEPTH:
        raise RequestError(f"messages nest values more than {MAX_DEPTH} deep", PARAM)
    if isinstance(value, str):
        return len(value)
    if isinstance(value, Mapping):
        return sum(text_size(key, depth) + text_size(item, depth + 1) for key, item in value.items())
    if isinstance(value, list | tuple):
        return sum(text_size(item, depth + 1) for item in value)
    return 0


def _check_message(message: Any, where: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise RequestError(f"{where} must be an object with role and content, not {type(message).__name__}", PARAM)
    if "role" not in message:
        raise RequestError(f'{where} has no role; give one, such as "user" or "assistant"', PARAM)
    role = message["role"]
    if not isinstance(role, str) or not role:
        raise RequestError(f"{where}.role must be a text of at least one character, not {role!r}", PARAM)
    _check_tool_calls(message.get("tool_calls"), f"{where}.tool_calls")
    return dict(message) | {"content": _content(message, where)}


def _check_tool_calls(calls: Any, where: str) -> None:
    """Tool calls go to the template as they are, which reads their keys: a list of objects, if any."""
    if calls is None:
        return
    if not isinstance(calls, list | tuple):
        raise RequestError(f"{where} must be a list of objects, not {type(calls).__name__}", PARAM)
    for index, call in enumerate(calls):
        if not isinstance(call, Mapping):
            raise RequestError(f"{where}[{index}] must be an object, not {type(call).__name__}", PARAM)
        function = call.get("function", {})
        if not isinstance(function, Mapping):
            raise RequestError(f"{where}[{index}].function must be an object, not {type(function).__name__}", PARAM)


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
