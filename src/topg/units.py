"""Sizes and shares as people write them: `4MB`, `80%`.

A number never stands without its unit.  Decimal units count in thousands and binary ones in 1024s, as the standards
have it (IEC 80000-13): 1 MB is 1,000,000 bytes, 1 MiB is 1,048,576.
"""

from __future__ import annotations

import re

from topg.errors import ConfigError

SIZE_UNITS = {
    "B": 1,
    "kB": 10**3, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
    "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40,
}  # fmt: skip

# At most twelve digits before the point: no quantity ToPG knows needs more, and the conversion stays cheap.
_QUANTITY = re.compile(r"(?P<number>[0-9]{1,12}(?:\.[0-9]{1,9})?) ?(?P<unit>[A-Za-z%]+)")


def parse_size(text: str) -> int:
    """Bytes of a size such as `4MB` or `512KiB`; raises ConfigError unless it is a whole number of bytes."""
    whole, decimals, unit = _split(text, tuple(SIZE_UNITS), what="a size", example="4MB or 512KiB")
    size, rest = divmod(int(whole + decimals) * SIZE_UNITS[unit], int(10 ** len(decimals)))
    if rest:
        raise ConfigError(f"{text!r} is not a whole number of bytes")
    return size


def parse_share(text: str) -> float:
    """A share such as `80%` as a number from 0 to 1."""
    whole, decimals, _ = _split(text, ("%",), what="a share", example="80%")
    share = float(f"{whole}.{decimals or 0}") / 100
    if share > 1:
        raise ConfigError(f"{text!r} is more than all of it; a share goes from 0% to 100%")
    return share


def format_size(size: int) -> str:
    """A size for people, in decimal units with at most one decimal: 98362432 is `98.4 MB`."""
    for unit in ("TB", "GB", "MB", "kB"):
        if size >= SIZE_UNITS[unit]:
            return f"{size / SIZE_UNITS[unit]:.1f}".removesuffix(".0") + f" {unit}"
    return f"{size} B"


def _split(text: str, units: tuple[str, ...], *, what: str, example: str) -> tuple[str, str, str]:
    """Digits before the point, digits after it, and the unit."""
    match = _QUANTITY.fullmatch(text)
    if match is None:
        raise ConfigError(f"{text!r} is not {what}; write a number and its unit, such as {example}")
    if match["unit"] not in units:
        raise ConfigError(f"{text!r} has no unit of {what}; the units are {', '.join(units)}")
    whole, _, decimals = match["number"].partition(".")
    return whole, decimals, match["unit"]
