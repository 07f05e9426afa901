"""What a chat template may use up: time, and characters built.

A template comes with the model, so it is foreign code.  It runs in the calling thread, which may be any thread, and
cannot be interrupted from outside there (signals reach the main thread only; a helper process for every chat would
cost more than the chats).  So the limits are checked from inside: every loop round, call, filter and operator passes
through `RenderLimits`, which counts what was built and looks at the clock, and no single operation can build more than
a bounded amount before it is counted.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from jinja2.exceptions import TemplateRuntimeError
from jinja2.utils import Namespace

BUDGET_FACTOR = 16  # characters built on the way, per character of the output limit
MAX_DEPTH = 100
MAX_WIDTH = 10_000  # of padding and formats, in characters
MAX_FORMAT = 10_000
MAX_INT_BITS = 65_536


class LimitError(TemplateRuntimeError):
    """A template went over one of its limits."""


class RenderLimits:
    """The account of one rendering.  `clock` gives seconds; `max_chars` bounds the output and any one value."""

    def __init__(self, max_seconds: float, max_chars: int, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._deadline = clock() + max_seconds
        self._max_seconds = max_seconds
        self.max_chars = max_chars
        self._budget = max_chars * BUDGET_FACTOR

    def tick(self, chars: int = 0) -> None:
        """Count `chars` built since the last tick; raises LimitError over the budget or past the deadline."""
        self._budget -= chars
        if self._budget < 0:
            raise LimitError(f"it builds more than {self.max_chars * BUDGET_FACTOR} characters on the way")
        if self._clock() > self._deadline:
            raise LimitError(f"it takes longer than {self._max_seconds:g} seconds")

    def require(self, chars: int) -> None:
        """Check the size of a value before it is built."""
        if chars > self.max_chars:
            raise LimitError(f"it builds a value of more than {self.max_chars} characters or items")
        self.tick()

    def charge(self, value: Any) -> Any:
        """Count a value that was built from checked ones; returns it."""
        self.tick(len(value) if isinstance(value, str | list | tuple | dict) else 1)
        return value

    def build(self, value: Any) -> Any:
        """Count a container with everything in it, as often as it is in it; returns it.

        A container that passes can be written out, compared or copied at bounded cost.
        """
        self.tick(self.measure(value))
        return value

    def measure(self, value: Any, depth: int = 0) -> int:
        """Characters and items in a value when it is written out; raises LimitError over the limit."""
        if isinstance(value, str):
            return len(value)
        if isinstance(value, Namespace):
            raise LimitError("it uses a namespace as a value")
        children = _children(value)
        if children is None:
            return 1
        if depth == MAX_DEPTH:
            raise LimitError(f"it nests values more than {MAX_DEPTH} deep")
        total = 1
        for child in children:
            total += self.measure(child, depth + 1)
            if total > self.max_chars:
                raise LimitError(f"it builds a value of more than {self.max_chars} characters or items")
        return total

    def each(self, items: Iterable[Any], chars: int) -> Iterator[Any]:
        """The items of a loop whose body writes `chars` characters of its own."""
        for item in items:
            self.tick(chars + 1)
            yield item


def _children(value: Any) -> Iterable[Any] | None:
    if isinstance(value, Mapping):
        return [*value.keys(), *value.values()]
    if isinstance(value, list | tuple | set | frozenset | type({}.values()) | type({}.items()) | type({}.keys())):
        return list(value)
    return None


def check_operator(limits: RenderLimits, operator: str, left: Any, right: Any) -> None:
    """Refuse an arithmetic operator whose result would be too large.  Operators: + * ** %."""
    if operator == "%" and isinstance(left, str):
        check_format(limits, left, right)
    elif operator == "*" and not _both_numbers(left, right):
        sequence, count = (right, left) if isinstance(left, int) else (left, right)
        limits.require(limits.measure(sequence) * count if isinstance(count, int) else 0)
    elif operator == "+" and not _both_numbers(left, right):
        limits.require(limits.measure(left) + limits.measure(right))
    elif isinstance(left, int) and isinstance(right, int):
        _check_int(operator, left, right)
    limits.tick()


def _both_numbers(left: Any, right: Any) -> bool:
    return isinstance(left, int | float) and isinstance(right, int | float)


def _check_int(operator: str, left: int, right: int) -> None:
    bits = {"**": left.bit_length() * abs(right), "*": left.bit_length() + right.bit_length()}
    if bits.get(operator, left.bit_length()) > MAX_INT_BITS:
        raise LimitError(f"it computes a number of more than {MAX_INT_BITS} bits")


def check_format(limits: RenderLimits, pattern: str, values: Any) -> None:
    """Refuse a format whose widths or values would give too long a text."""
    if len(pattern) > MAX_FORMAT or re.search(r"\d{5}|%[^a-zA-Z%]*\*|\{[^{}]*\{", pattern):
        raise LimitError(f"it uses a format longer than {MAX_FORMAT} characters, or one with wide or computed widths")
    limits.require(len(pattern) * max(1, limits.measure(values)))


def check_replace(limits: RenderLimits, text: str, old: Any, new: Any) -> None:
    """Refuse a replacement whose result would be too long."""
    if isinstance(old, str) and isinstance(new, str):
        limits.require(len(text) + text.count(old) * len(new))


def check_width(*widths: Any) -> None:
    """Refuse paddings that are wide, such as those of `center`."""
    if any(isinstance(width, int) and abs(width) > MAX_WIDTH for width in widths):
        raise LimitError(f"it pads to more than {MAX_WIDTH} characters")
