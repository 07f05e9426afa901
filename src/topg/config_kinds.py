"""Kinds of configuration values: what each accepts, from a file and from text, and how it is shown.

`from_text` gives what a YAML file would hold for the same text, so that files, environment variables and flags share
one check, `read`.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from typing import Any, TypeGuard

from topg.errors import ConfigError
from topg.units import SIZE_UNITS, parse_share, parse_size

# No underscores, no plus sign, no leading zeros (010 is eight in some programs and ten in others).
WHOLE_NUMBER = re.compile(r"0|-?[1-9][0-9]{0,19}")
SWITCH_WORDS = {"true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False}


class Kind(ABC):
    """The type and range of one setting."""

    @abstractmethod
    def accepts(self, value: object) -> bool:
        """Whether `value` is a value of this kind, as the configuration holds it."""

    def read(self, value: object) -> Any:
        """The setting's value from what a file holds; raises ConfigError, without the key, when it is not allowed."""
        if not self.accepts(value):
            raise self.refuse(value)
        return value

    @abstractmethod
    def allowed(self) -> str:
        """What is accepted, for messages and the reference."""

    @abstractmethod
    def show(self, value: Any) -> str:
        """A value as a file would hold it; `read` gives it back."""

    def from_text(self, text: str) -> object:
        """What a file would hold for the text of a flag or variable."""
        return text

    def refuse(self, value: object) -> ConfigError:
        """The error for a value that is not accepted."""
        return ConfigError(f"{_shown(value)} is not allowed; it takes {self.allowed()}")


class Whole(Kind):
    """A whole number from `low` to `high`."""

    def __init__(self, low: int, high: int) -> None:
        self.low, self.high = low, high

    def accepts(self, value: object) -> bool:
        return _is_integer(value) and self.low <= value <= self.high

    def allowed(self) -> str:
        return f"a whole number from {self.low} to {self.high}"

    def show(self, value: Any) -> str:
        return str(value)

    def from_text(self, text: str) -> object:
        return int(text) if WHOLE_NUMBER.fullmatch(text) else text


class Switch(Kind):
    """On or off."""

    def accepts(self, value: object) -> bool:
        return isinstance(value, bool)

    def allowed(self) -> str:
        return "true or false, without quotes"

    def show(self, value: Any) -> str:
        return "true" if value else "false"

    def from_text(self, text: str) -> object:
        return SWITCH_WORDS.get(text, text)


class Choice(Kind):
    """One of a few words."""

    def __init__(self, *words: str) -> None:
        self.words = words

    def accepts(self, value: object) -> bool:
        return value in self.words

    def allowed(self) -> str:
        return " or ".join(self.words)

    def show(self, value: Any) -> str:
        return str(value)


class Size(Kind):
    """Bytes, written with a unit; with `auto`, the word `auto` stands for None."""

    def __init__(self, low: int, high: int, *, auto: bool = False) -> None:
        self.low, self.high, self.auto = low, high, auto

    def accepts(self, value: object) -> bool:
        return (self.auto and value is None) or (_is_integer(value) and self.low <= value <= self.high)

    def read(self, value: object) -> int | None:
        if self.auto and value == "auto":
            return None
        if not isinstance(value, str) or not self.accepts(parse_size(value)):
            raise self.refuse(value)
        return parse_size(value)

    def allowed(self) -> str:
        size = f"a size with its unit, such as 4MB or 512KiB, from {self.show(self.low)} to {self.show(self.high)}"
        return f"{size}, or auto" if self.auto else size

    def show(self, value: Any) -> str:
        if value is None:
            return "auto"
        unit = max((name for name in SIZE_UNITS if value % SIZE_UNITS[name] == 0), key=SIZE_UNITS.__getitem__)
        return f"{value // SIZE_UNITS[unit]}{unit}"


class Share(Kind):
    """A part of a whole, written in per cent, held as a number from 0 to 1."""

    def __init__(self, low: float, high: float) -> None:
        self.low, self.high = low, high

    def accepts(self, value: object) -> bool:
        return isinstance(value, float) and self.low <= value <= self.high

    def read(self, value: object) -> float:
        if not isinstance(value, str) or not self.accepts(parse_share(value)):
            raise self.refuse(value)
        return parse_share(value)

    def allowed(self) -> str:
        return f"a share from {self.show(self.low)} to {self.show(self.high)}"

    def show(self, value: Any) -> str:
        return f"{value * 100:g}%"


def _is_integer(value: object) -> TypeGuard[int]:
    # bool is a subclass of int: `max_batch_size: true` is a mistake, not 1.
    return isinstance(value, int) and not isinstance(value, bool)


def _shown(value: object) -> str:
    if value is None:
        return "an empty value"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return f"the text {value!r}"
    return repr(value)
