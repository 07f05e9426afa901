"""Sizes and shares: what is read, and what is refused."""

from __future__ import annotations

import pytest

from topg.errors import ConfigError
from topg.units import format_size, parse_share, parse_size


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("4MB", 4_000_000), ("4 MB", 4_000_000), ("512KiB", 524_288), ("1.5GiB", 1_610_612_736), ("0B", 0),
        ("1kB", 1000), ("1KB", 1000), ("2TB", 2 * 10**12), ("0.5KiB", 512),
    ],
)  # fmt: skip
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize(
    "text",
    ["", "4", "4096", "MB", "4mb", "4 parsecs", "-4MB", "4_000MB", "1e6B", "4MB ", "4  MB", "4MB8", "٤MB", "9" * 30],
)
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse_size(text)
    assert repr(text) in str(error.value)


def test_a_size_is_a_whole_number_of_bytes() -> None:
    with pytest.raises(ConfigError, match="whole number of bytes"):
        parse_size("0.3B")


def test_an_unknown_unit_names_the_units() -> None:
    with pytest.raises(ConfigError, match="the units are B, kB"):
        parse_size("80%")


@pytest.mark.parametrize(("text", "share"), [("80%", 0.8), ("0%", 0.0), ("100%", 1.0), ("12.5%", 0.125)])
def test_shares(text: str, share: float) -> None:
    assert parse_share(text) == share


@pytest.mark.parametrize("text", ["80", "0.8", "101%", "-1%", "80 percent", "%"])
def test_what_is_no_share(text: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse_share(text)
    assert repr(text) in str(error.value)


@pytest.mark.parametrize(
    ("size", "text"), [(0, "0 B"), (999, "999 B"), (1000, "1 kB"), (98_362_432, "98.4 MB"), (4_000_000, "4 MB")]
)
def test_sizes_for_people(size: int, text: str) -> None:
    assert format_size(size) == text
