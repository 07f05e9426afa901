"""Rendering a chat with the template that came with the model, safely.

Templates are written for the `transformers` library, so the environment offers what that one does: `raise_exception`,
`strftime_now`, `tojson` without HTML escapes, loop controls, the `generation` tag, trimmed blocks, and the texts of
special tokens as `bos_token` and so on.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import cached_property
from typing import Any, NoReturn

from topg.errors import ChatTemplateError

MAX_SECONDS = 2.0
MAX_OUTPUT_CHARS = 4_000_000
MAX_SOURCE_CHARS = 256_000
MAX_DATE_FORMAT = 200

_FAILURES = (TypeError, ValueError, ArithmeticError, LookupError, AttributeError, RecursionError, MemoryError)


class ChatTemplate:
    """A chat template; compiled at its first use, so that a broken one leaves plain prompts alone.

    `source` is None for a model without one, `names` are variables every rendering gets (`bos_token`, ...).
    """

    def __init__(
        self,
        source: str | None,
        names: Mapping[str, str],
        *,
        max_seconds: float = MAX_SECONDS,
        max_chars: int = MAX_OUTPUT_CHARS,
        now: Callable[[], datetime] = datetime.now,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.source = source
        self._names = dict(names)
        self._max_seconds = max_seconds
        self._max_chars = max_chars
        self._now = now
        self._clock = clock

    def render(self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True) -> str:
        """The text of a chat.  Templates see `tools` as none.

        Raises ChatTemplateError (param "messages") when there is no template, when it is broken, refuses the messages
        (its own words are in the message), reaches for what the sandbox does not offer, or goes over its limits.
        """
        from jinja2.exceptions import TemplateError

        from topg.tokenizer.template_limits import RenderLimits
        from topg.tokenizer.template_sandbox import LIMITS

        compiled = self._compiled
        limits = RenderLimits(self._max_seconds, self._max_chars, self._clock)
        variables: dict[str, Any] = {"messages": messages, "tools": None} | self._names
        variables |= {"add_generation_prompt": add_generation_prompt, LIMITS: limits}
        try:
            return _collect(compiled.generate(variables), limits)
        except TemplateError as error:
            raise _error(f"the chat template failed: {error.message}") from error
        except _FAILURES as error:
            raise _error(f"the chat template failed: {type(error).__name__}: {error}") from error

    def compile(self) -> None:
        """Raises the ChatTemplateError that every chat would get: there is no template, or it is broken or too long."""
        _ = self._compiled

    @cached_property
    def _compiled(self) -> Any:
        from jinja2.exceptions import TemplateError

        from topg.tokenizer.template_sandbox import TemplateEnvironment

        if self.source is None:
            raise _error("the model has no chat template; use plain prompts with it, or a model that has one")
        if len(self.source) > MAX_SOURCE_CHARS:
            raise _error(f"the chat template has {len(self.source)} characters; at most {MAX_SOURCE_CHARS} are read")
        environment = TemplateEnvironment({"raise_exception": _refuse, "strftime_now": self._strftime_now})
        try:
            return environment.compile_counted(self.source)
        except TemplateError as error:
            line = getattr(error, "lineno", None)
            raise _error(f"the chat template cannot be used: {error.message} (line {line})") from error
        except (*_FAILURES, SyntaxError) as error:
            raise _error(f"the chat template cannot be used: {type(error).__name__}: {error}") from error

    def _strftime_now(self, pattern: str) -> str:
        if len(pattern) > MAX_DATE_FORMAT:
            raise ValueError(f"a date format of {len(pattern)} characters; at most {MAX_DATE_FORMAT} are allowed")
        return self._now().strftime(pattern)


def _collect(pieces: Any, limits: Any) -> str:
    """Join what the template writes, as long as it stays under the limit."""
    parts, chars = [], 0
    for piece in pieces:
        parts.append(piece)
        chars += len(piece)
        limits.require(chars)
    return "".join(parts)


def _refuse(message: Any) -> NoReturn:
    """`raise_exception` of templates: the messages do not suit the model."""
    from jinja2.exceptions import TemplateError

    raise TemplateError(str(message))


def _error(message: str) -> ChatTemplateError:
    return ChatTemplateError(message, "messages")
