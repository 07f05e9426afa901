"""Phrases that error messages of this package share."""

from __future__ import annotations

from collections.abc import Sequence

from topg.wording import shown


def listed(names: Sequence[str], most: int = 5) -> str:
    """Names out of a file in a sentence: "'a', 'b' and 3 more"."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(map(shown, names[:most])) + more
