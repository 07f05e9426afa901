"""Reports of a pull for tests."""

from __future__ import annotations

from dataclasses import dataclass, field


class SilentReport:
    """Tells nobody."""

    def note(self, text: str) -> None: ...

    def progress(self, what: str, done: int, total: int) -> None: ...


@dataclass
class Notes:
    """Keeps what it is told: the notes, and the (what, done, total) of every step."""

    notes: list[str] = field(default_factory=list)
    steps: list[tuple[str, int, int]] = field(default_factory=list)

    def note(self, text: str) -> None:
        self.notes.append(text)

    def progress(self, what: str, done: int, total: int) -> None:
        self.steps.append((what, done, total))

    @property
    def finished(self) -> list[str]:
        """What came to its end, in order."""
        return [what for what, done, total in self.steps if done == total]
