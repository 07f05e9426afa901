"""Stop strings on a stream of text: hold back what may become one, cut at the earliest."""

from __future__ import annotations

from collections.abc import Iterable

from topg.errors import RequestError


class StopMatcher:
    """Watches text as it is generated for any of several stop strings.

        stops ["cd", "bcx"]      push("ab") -> ("a", False)     "b" is held: it may become "bcx"
                                 push("cd") -> ("b", True)      cut before "cd"

    The stop string that begins earliest counts, whatever the order of the list; of two that begin together, the
    shorter.  What is emitted and where it is cut do not depend on how the text is split into pushes: a complete stop
    string waits as long as one that begins before it may still be completed.
    """

    def __init__(self, stops: Iterable[str], include_stop: bool = False) -> None:
        self._stops = tuple(dict.fromkeys(stops))
        for stop in self._stops:
            if not isinstance(stop, str) or not stop:
                raise RequestError(f"stop strings must be texts of at least one character, not {stop!r}", "stop")
        self._include_stop = include_stop
        self._held = ""
        self.matched: str | None = None
        """The stop string that ended the text, or None."""

    def push(self, text: str) -> tuple[str, bool]:
        """Text that is safe to send now, and whether a stop string ended it (nothing is emitted after that)."""
        if not self._stops:
            return text, False
        if self.stopped:
            return "", True
        pending = self._held + text
        found, open_from = self._earliest(pending), self._open_from(pending)
        if found is None or open_from < found[0]:
            self._held = pending[open_from:]
            return pending[:open_from], False
        return self._cut(pending, *found), True

    def flush(self) -> str:
        """What was held back, once generation has ended: a part of a stop string is ordinary text.

        A complete stop string among it still cuts; `stopped` tells.
        """
        held, self._held = self._held, ""
        found = self._earliest(held)
        return held if found is None else self._cut(held, *found)

    @property
    def stopped(self) -> bool:
        """Whether a stop string has ended the text."""
        return self.matched is not None

    def _cut(self, text: str, start: int, stop: str) -> str:
        self._held, self.matched = "", stop
        return text[: start + len(stop)] if self._include_stop else text[:start]

    def _earliest(self, text: str) -> tuple[int, str] | None:
        """Start and text of the stop string that begins first in `text`, the shortest of those."""
        places = [(text.find(stop), len(stop), stop) for stop in self._stops]
        found = min((place for place in places if place[0] >= 0), default=None)
        return None if found is None else (found[0], found[2])

    def _open_from(self, text: str) -> int:
        """Where the longest tail of `text` begins that is an unfinished stop string; its length if there is none."""
        longest = max((len(stop) for stop in self._stops), default=1)
        for start in range(max(0, len(text) - longest + 1), len(text)):
            tail = text[start:]
            if any(len(stop) > len(tail) and stop.startswith(tail) for stop in self._stops):
                return start
        return len(text)
