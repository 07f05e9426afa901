"""Flags of the configuration, made from its settings, and the kinds of values that flags take."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Callable
from pathlib import Path

from topg.cli.parser import PRINT_CONFIG
from topg.config import SETTINGS, Resolved, Setting, resolve
from topg.config_kinds import WHOLE_NUMBER, Kind, Switch
from topg.errors import ConfigError

# Digits of ASCII only, as everywhere: Python's own float() also takes underscores, other scripts' digits and "nan".
_DECIMAL = re.compile(r"-?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][-+]?[0-9]+)?")


def filled(text: str) -> str:
    """The type of a flag or argument that cannot be empty."""
    if not text:
        raise argparse.ArgumentTypeError("an empty text is not allowed; leave it out, or give a value")
    return text


def filled_path(text: str) -> Path:
    """The type of a path.  An empty text, which Python takes for the folder one is in, is refused."""
    return Path(filled(text))


def whole_number(text: str) -> int:
    """The type of a flag that takes a whole number, written as in a configuration file."""
    if WHOLE_NUMBER.fullmatch(text) is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number; write it with the digits 0 to 9 only")
    return int(text)


def decimal_number(text: str) -> float:
    """The type of a flag that takes a number with decimals."""
    if _DECIMAL.fullmatch(text) is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number; write it with digits and a point, such as 0.7")
    return float(text)


def add_config_options(parser: argparse.ArgumentParser) -> None:
    """Add `--config FILE`, `--print-config` and a flag for every setting."""
    group = parser.add_argument_group("configuration", "A flag beats its variable, and that the file.")
    group.add_argument(
        "--config", type=filled_path, metavar="FILE", help="configuration file (default: $TOPG_CONFIG or none)"
    )
    group.add_argument(PRINT_CONFIG, action="store_true", help="only show the settings in force and their origins")
    for setting in SETTINGS.values():
        _add_setting(group, setting)


def config_from(args: argparse.Namespace) -> Resolved:
    """The configuration from the flags, the environment and the file that the arguments name."""
    given = {key: getattr(args, key) for key in SETTINGS if getattr(args, key) is not None}
    return resolve(given, os.environ, args.config)


def _add_setting(group: argparse._ArgumentGroup, setting: Setting[object]) -> None:
    # Percent signs are doubled, since argparse formats help texts.
    help = f"{setting.help} Default: {setting.kind.show(setting.default)}.".replace("%", "%%")
    if isinstance(setting.kind, Switch):
        switch = argparse.BooleanOptionalAction
        group.add_argument(setting.flag, dest=setting.key, action=switch, default=None, help=help)
        return
    metavar = type(setting.kind).__name__.upper()
    group.add_argument(setting.flag, dest=setting.key, type=_checked(setting.kind), metavar=metavar, help=help)


def _checked(kind: Kind) -> Callable[[str], object]:
    def convert(text: str) -> object:
        value = kind.from_text(text)
        try:
            kind.read(value)
        except ConfigError as error:
            raise argparse.ArgumentTypeError(str(error)) from None
        return value

    return convert
