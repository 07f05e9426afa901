"""The parser of every verb: argparse, with errors of one line that name the nearest flag."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from itertools import takewhile
from typing import Any, NoReturn

from topg.cli.messages import say
from topg.wording import did_you_mean

HELP_WIDTH = 100
EXIT_USAGE = 2
PRINT_CONFIG = "--print-config"


class Parser(argparse.ArgumentParser):
    """A parser without abbreviated flags, whose help is of the same width everywhere."""

    def __init__(self, **options: Any) -> None:
        super().__init__(formatter_class=_Formatter, allow_abbrev=False, **options)

    def parse(self, arguments: Sequence[str]) -> argparse.Namespace:
        """As `parse_args`, and an unknown flag comes before all other errors.

        With `--print-config` nothing else is done, so that the model may be left out.
        """
        self._refuse_unknown_flags(arguments)
        if PRINT_CONFIG in arguments:
            for action in self._actions:
                action.nargs = action.nargs if action.option_strings else "?"
                action.required = False
        return self.parse_args(arguments)

    def error(self, message: str) -> NoReturn:
        """One line on standard error instead of the whole usage, and out with status 2."""
        say(f"{self.prog}: error: {message}; see {self.prog} --help")
        self.exit(EXIT_USAGE)

    def _refuse_unknown_flags(self, arguments: Iterable[str]) -> None:
        known = self._option_string_actions
        for argument in takewhile(lambda item: item != "--", arguments):
            flag = argument.partition("=")[0]
            # argparse takes a text with a space for a value: `--prompt "--- a line"`.
            if flag.startswith("--") and " " not in argument and flag not in known:
                self.error(f"there is no flag {flag}{did_you_mean(flag, known)}")


class _Formatter(argparse.RawDescriptionHelpFormatter):
    """The documentation holds the help word for word."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, width=HELP_WIDTH, max_help_position=30)
