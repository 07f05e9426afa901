"""Keeping special tokens that a user wrote apart from those a chat template writes.

A template is a program: it may trim, cut, join or compare the texts it is given.  So the texts must go through it with
nothing added that a filter would see.  `MarkerQuoter` swaps single characters, one for one: the first character of a
special token written out in a text, and the first or last character of a piece at the text's edge that could become
a special token next to other text.  Only plain words pass as they are, since templates compare roles.  No special
token can then come out of the template that the template did not write, and swapping the characters back gives
exactly the text that the plain texts would have given.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

PRIVATE_USE = range(0xE100, 0xF900)  # characters no text should hold; those in use anyway are not taken


class Markers:
    """The special tokens of a tokenizer, prepared for looking them up in texts (some models have thousands)."""

    def __init__(self, specials: Iterable[str]) -> None:
        texts = frozenset(text for text in specials if text)
        first = "".join(sorted({re.escape(text[0]) for text in texts}))
        self._texts = texts
        self._first = re.compile(f"[{first}]" if texts else "(?!)")
        self._lengths = sorted({len(text) for text in texts}, reverse=True)
        self.beginnings = frozenset(text[:length] for text in texts for length in range(1, len(text)))
        self.endings = frozenset(text[-length:] for text in texts for length in range(1, len(text)))
        self.longest_piece = max(self._lengths, default=1) - 1

    def replace(self, text: str, new: Callable[[str], str]) -> str:
        """`text` with `new(marker)` for each marker, the longest at each place; linear in the text's length."""
        parts, done = [], 0
        for found in self._first.finditer(text):
            marker = self._at(text, found.start()) if found.start() >= done else ""
            if marker:
                parts += [text[done : found.start()], new(marker)]
                done = found.start() + len(marker)
        return "".join([*parts, text[done:]])

    def _at(self, text: str, start: int) -> str:
        pieces = (text[start : start + length] for length in self._lengths)
        return next((piece for piece in pieces if piece in self._texts), "")


class MarkerQuoter:
    """Swaps characters of special tokens in user texts for stand-ins, and back.

    `surroundings` are all texts (nested in lists and mappings) that may meet: a stand-in is a character in none of
    them.
    """

    def __init__(self, markers: Markers, surroundings: Sequence[Any]) -> None:
        self._markers = markers
        self._surroundings = surroundings
        self._stand_ins: dict[str, str] = {}

    @property
    def used(self) -> bool:
        """Whether any character was swapped."""
        return bool(self._stand_ins)

    def quote(self, value: Any) -> Any:
        """`value` with the texts in it quoted, at any depth; keys of mappings stay as they are."""
        if isinstance(value, str):
            return self._quote_text(value)
        if isinstance(value, Mapping):
            return {key: self.quote(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.quote(item) for item in value]
        return value

    def unquote(self, text: str) -> str:
        """`text` with every stand-in swapped back."""
        return text.translate({ord(stand_in): character for character, stand_in in self._stand_ins.items()})

    def _quote_text(self, text: str) -> str:
        quoted = self._markers.replace(text, lambda marker: self._stand_in(marker[0]) + marker[1:])
        return quoted if quoted.isidentifier() else self._quote_end(self._quote_start(quoted))

    def _quote_end(self, text: str) -> str:
        """Swap the first character of an unfinished special token at the end; a template may trim spaces after it."""
        body = text.rstrip()
        for length in range(min(self._markers.longest_piece, len(body)), 0, -1):
            if body[-length:] in self._markers.beginnings:
                at = len(body) - length
                return text[:at] + self._stand_in(text[at]) + text[at + 1 :]
        return text

    def _quote_start(self, text: str) -> str:
        """Swap the last character of the rest of a special token at the start."""
        skipped = len(text) - len(text.lstrip())
        for length in range(min(self._markers.longest_piece, len(text) - skipped), 0, -1):
            if text[skipped : skipped + length] in self._markers.endings:
                at = skipped + length - 1
                return text[:at] + self._stand_in(text[at]) + text[at + 1 :]
        return text

    def _stand_in(self, character: str) -> str:
        if character not in self._stand_ins:
            taken = set(self._stand_ins.values())
            texts = list(_texts(self._surroundings))
            free = (chr(code) for code in PRIVATE_USE)
            self._stand_ins[character] = next(
                sign for sign in free if sign not in taken and not any(sign in text for text in texts)
            )
        return self._stand_ins[character]


def _texts(value: Any) -> Iterable[str]:
    """Every text in nested lists and mappings, keys included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _texts(key)
            yield from _texts(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _texts(item)
