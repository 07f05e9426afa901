"""What a pull tells whoever started it."""

from __future__ import annotations

from typing import Protocol


class Report(Protocol):
    """Receives the course of a pull."""

    def note(self, text: str) -> None:
        """One sentence for the reader."""

    def progress(self, what: str, done: int, total: int) -> None:
        """`done` of `total` bytes of `what` are there."""
