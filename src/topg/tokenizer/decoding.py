"""How tokens become text, read off the decoder of a tokenizer.json.

Two families cover the models ToPG serves:

    byte-level BPE   a token is a row of bytes, each written as one printable character (GPT-2's table)
    SPM-like BPE     a token is text with U+2581 for a space; `<0x0A>` stands for one byte; some tokenizers strip
                     one space at the start of the whole text

Anything else is refused by name, because the streaming detokeniser must know the rules to hold text back rightly.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from topg.errors import UnsupportedModelError

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


@dataclass(frozen=True)
class DecoderRules:
    """What a decoder does to token texts.

    `replacements` are (from, to) pairs applied to each token; `strip_start` is how many spaces go at the start of the
    whole text.  In a byte-level decoder only `byte_level` matters.
    """

    byte_level: bool
    replacements: tuple[tuple[str, str], ...] = ()
    byte_fallback: bool = False
    strip_start: int = 0

    @classmethod
    def from_json(cls, decoder: Mapping[str, Any] | None) -> DecoderRules:
        """Read the `decoder` part of a tokenizer.json; raises UnsupportedModelError for one of another kind."""
        steps = _steps(decoder)
        kinds = [step.get("type") for step in steps]
        if kinds == ["ByteLevel"]:
            return cls(byte_level=True)
        if "Fuse" not in kinds:
            raise _unsupported(kinds)
        fuse = kinds.index("Fuse")
        return _spm_like(steps[:fuse], steps[fuse + 1 :], kinds)

    def bytes_of(self, token: str) -> bytes:
        """The bytes that a token adds to the text."""
        if self.byte_level:
            return _byte_level_bytes(token)
        text = self.text_of(token)
        byte = self.byte_of(text)
        return text.encode() if byte is None else bytes([byte])

    def text_of(self, token: str) -> str:
        """The text of a token of an SPM-like tokenizer."""
        for old, new in self.replacements:
            token = token.replace(old, new)
        return token

    def byte_of(self, text: str) -> int | None:
        """The byte that `<0x0A>` and its like stand for; None for other texts."""
        match = _BYTE_TOKEN.fullmatch(text) if self.byte_fallback else None
        return None if match is None else int(match[1], 16)


def _steps(decoder: Mapping[str, Any] | None) -> list[Mapping[str, Any]]:
    if decoder is None:
        return []
    return list(decoder["decoders"]) if decoder.get("type") == "Sequence" else [decoder]


def _spm_like(per_token: list[Mapping[str, Any]], whole: list[Mapping[str, Any]], kinds: list[Any]) -> DecoderRules:
    """Replace and ByteFallback act on tokens, Strip on the fused text."""
    replacements, fallback = [], False
    for step in per_token:
        pattern = step.get("pattern", {}).get("String") if step.get("type") == "Replace" else None
        if step.get("type") == "ByteFallback":
            fallback = True
        elif pattern is not None and not fallback:
            replacements.append((pattern, step["content"]))
        else:
            raise _unsupported(kinds)
    return DecoderRules(False, tuple(replacements), fallback, _strip_start(whole, kinds))


def _strip_start(whole: list[Mapping[str, Any]], kinds: list[Any]) -> int:
    if not whole:
        return 0
    step = whole[0]
    if len(whole) > 1 or step.get("type") != "Strip" or step.get("content") != " " or step.get("stop"):
        raise _unsupported(kinds)
    return int(step["start"])


def _unsupported(kinds: list[Any]) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"tokenizer.json has a decoder of the steps {kinds or 'none'}; supported are ByteLevel, and "
        "Replace + ByteFallback + Fuse (+ Strip of spaces at the start)"
    )


def _byte_level_bytes(token: str) -> bytes:
    """Bytes of a byte-level token; a token with characters outside the table (an added one) is its own text."""
    table = byte_level_alphabet()
    try:
        return bytes(table[character] for character in token)
    except KeyError:
        return token.encode()


@cache
def byte_level_alphabet() -> dict[str, int]:
    """GPT-2's table: printable Latin-1 characters stand for themselves, the other bytes for U+0100 onwards."""
    own = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in own]
    return {chr(byte): byte for byte in own} | {chr(0x100 + i): byte for i, byte in enumerate(others)}
