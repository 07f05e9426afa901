"""What a chat template may use up: time, and characters built.

A template comes with the model, so it is foreign code.  It runs in the calling thread, which may be any thread, and
cannot be interrupted from outside there (signals reach the main thread only; a helper process for every chat would
cost more than the chats).  So the limits are checked from inside: every loop round, call, filter, test, comparison and
operator passes through `RenderLimits`, which counts what was built and looks at the clock, and no single operation can
build more than a bounded amount before it is counted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain
from typing import Any

from jinja2.exceptions import TemplateRuntimeError
from jinja2.runtime import LoopContext
from jinja2.utils import Namespace

BUDGET_FACTOR = 16  # characters built on the way, per character of the output limit
MAX_DEPTH = 100
MAX_ITEMS = 1_000_000  # of one list made in one go; an item weighs as much as some sixty characters

_CONTAINERS: tuple[Any, ...] = (list, tuple, set, frozenset, type({}.values()), type({}.items()), type({}.keys()))


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

    def require_items(self, count: int) -> None:
        """Check how many items a list will have before it is built."""
        if count > MAX_ITEMS:
            raise LimitError(f"it builds a list of more than {MAX_ITEMS} items")
        self.tick()

    def charge(self, value: Any) -> Any:
        """Count a value that was built; returns it.

        A container that passes can be written out, compared or copied at bounded cost.
        """
        size = 1 if isinstance(value, Namespace) else self.measure(value)
        self.require(size)
        self.tick(size)
        return value

    def measure(self, value: Any, depth: int = 0) -> int:
        """Characters and items in a value when it is written out; raises LimitError for a container over the limit."""
        if isinstance(value, str):
            return len(value)
        if isinstance(value, Namespace | LoopContext):
            raise LimitError(f"it uses a {type(value).__name__} as a value")
        children = _children(value)
        if children is None:
            return 1
        if depth == MAX_DEPTH:
            raise LimitError(f"it nests values more than {MAX_DEPTH} deep")
        self.tick()
        total = 1
        for child in children:
            total += len(child) if isinstance(child, str) else self.measure(child, depth + 1)
            if total > self.max_chars:
                raise LimitError(f"it builds a value of more than {self.max_chars} characters or items")
        return total

    def each(self, items: Iterable[Any], chars: int = 0) -> Iterator[Any]:
        """The items of a loop whose body writes `chars` characters of its own."""
        for item in items:
            self.tick(chars + 1)
            yield item

    def listed(self, items: Iterable[Any], extra: int = 0) -> list[Any]:
        """The items as a list, measured one by one, each with `extra` characters that it will cost.

        An iterator is used up by it: go on with the list.
        """
        found: list[Any] = []
        total = 0
        for item in self.each(items):
            total += self.measure(item) + extra
            found.append(item)
            if total > self.max_chars or len(found) > MAX_ITEMS:
                raise LimitError(f"it builds a list of more than {self.max_chars} characters or {MAX_ITEMS} items")
        return found


def _children(value: Any) -> Iterable[Any] | None:
    if isinstance(value, Mapping):
        return chain(value.keys(), value.values())
    return value if isinstance(value, _CONTAINERS) else None
