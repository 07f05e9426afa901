"""Flags of the configuration, made from its settings: every verb that runs a model takes the same ones."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from pathlib import Path

from topg.config import SETTINGS, Resolved, Setting, resolve
from topg.config_kinds import Kind, Switch
from topg.errors import ConfigError


def add_config_options(parser: argparse.ArgumentParser) -> None:
    """Add `--config FILE`, `--print-config` and a flag for every setting."""
    group = parser.add_argument_group("configuration", "A flag beats its variable, and that the file.")
    group.add_argument("--config", type=Path, metavar="FILE", help="configuration file (default: $TOPG_CONFIG or none)")
    group.add_argument("--print-config", action="store_true", help="show the settings in force and their origins")
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
