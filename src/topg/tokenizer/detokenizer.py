"""Tokens to text, one token at a time, never half a character."""

from __future__ import annotations

import codecs
from collections.abc import Callable
from typing import Protocol

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class Detokenizer(Protocol):
    """Turns the tokens of one sequence into pieces of text.

    The pieces joined (with `flush` last) equal decoding all tokens at once, and no piece holds U+FFFD for bytes that a
    later token could still complete.  Special tokens add nothing.  Each call is O(1) amortised.
    """

    def push(self, token_id: int) -> str:
        """Text that this token completes; may be empty."""
        ...

    def flush(self) -> str:
        """What is left at the end: bytes that never became a character, as U+FFFD."""
        ...


class ByteLevelDetokenizer:
    """For byte-level tokenizers: a UTF-8 decoder that keeps an unfinished character.

    `bytes_of(token id)` gives a token's bytes, none for a token that is not shown.
    """

    def __init__(self, bytes_of: Callable[[int], bytes]) -> None:
        self._bytes_of = bytes_of
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        """See Detokenizer."""
        return self._decoder.decode(self._bytes_of(token_id))

    def flush(self) -> str:
        """See Detokenizer."""
        return self._decoder.decode(b"", final=True)


class SpmDetokenizer:
    """For SPM-like tokenizers: text tokens pass at once, byte tokens are kept until their run ends.

    A run of byte tokens is decoded as a whole, and if it is not valid UTF-8 each byte of it becomes one U+FFFD (the
    rule of the reference decoder).  So a run is complete only when another token follows.

    `piece_of(token id)` gives a token's text, its byte as an int, or None for a token that is not shown; `strip_start`
    is how many spaces are left out at the start of the text.
    """

    def __init__(self, piece_of: Callable[[int], str | int | None], strip_start: int) -> None:
        self._piece_of = piece_of
        self._to_strip = strip_start
        self._run = bytearray()

    def push(self, token_id: int) -> str:
        """See Detokenizer."""
        piece = self._piece_of(token_id)
        if isinstance(piece, int):
            self._run.append(piece)
            return ""
        return "" if piece is None else self._strip(self._end_run() + piece)

    def flush(self) -> str:
        """See Detokenizer."""
        return self._strip(self._end_run())

    def _end_run(self) -> str:
        run, self._run = bytes(self._run), bytearray()
        try:
            return run.decode()
        except UnicodeDecodeError:
            return REPLACEMENT * len(run)

    def _strip(self, text: str) -> str:
        """Leave out spaces as long as some are due and nothing else has come."""
        if not self._to_strip or not text:
            return text
        rest = text.removeprefix(" ")
        self._to_strip = self._to_strip - 1 if rest != text else 0
        return self._strip(rest)
