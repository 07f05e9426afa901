"""What messages are made of: the nearest known name, and text that is safe to print in a terminal."""

from __future__ import annotations

from collections.abc import Iterable

MAX_MESSAGE = 2000
MAX_SHOWN = 80
ELLIPSIS = " ... "


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """`; did you mean 'generate'?` for the known word that is nearest to `word`; empty when none is near."""
    from difflib import get_close_matches

    nearest = get_close_matches(word[:MAX_MESSAGE], list(known), n=1)
    return f"; did you mean {nearest[0]!r}?" if nearest else ""


def printable(text: str) -> str:
    r"""A text as one line that cannot steer a terminal, of MAX_MESSAGE characters at most.

    A longer one loses its middle.  What is not printable (escapes, line breaks, marks that turn the direction of
    writing) is written out: `\x1b`.
    """
    escaped = "".join(
        character if character.isprintable() else character.encode("unicode_escape").decode("ascii")
        for character in _shortened(text)
    )
    return _shortened(escaped)


def _shortened(text: str) -> str:
    if len(text) <= MAX_MESSAGE:
        return text
    half = (MAX_MESSAGE - len(ELLIPSIS)) // 2
    return f"{text[:half]}{ELLIPSIS}{text[-half:]}"


def shown(value: object) -> str:
    """A value for a message, at most 83 characters of it."""
    try:
        text = repr(value)
    except ValueError:  # Python refuses to write out whole numbers of more than some thousand digits
        return "a number of thousands of digits"
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}..."
