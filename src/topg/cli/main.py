"""The command line: `topg VERB`, one file a verb, imported only when it is used.

A verb's module holds `HELP` (one line), `add_arguments(parser)` and `run(args) -> int | None`, the exit status.

Exit status: 0 done, 1 an error, 2 wrong usage, 130 interrupted.
"""

from __future__ import annotations

import argparse
import ast
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from types import ModuleType

from topg import __version__
from topg.errors import TopgError

VERBS = ("pull", "convert", "plan", "generate", "chat")

HELP_WIDTH = 100
EXIT_ERROR = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command line and return the exit status."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    try:
        return _flushed(arguments)
    except BrokenPipeError:
        # The reader went away (`topg plan | head`).  Python flushes again at exit, which must not fail.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_ERROR
    except (TopgError, OSError) as error:
        print(f"topg: error: {' '.join(str(error).split())}", file=sys.stderr)
        return EXIT_ERROR
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED


def _flushed(arguments: Sequence[str]) -> int:
    try:
        return _dispatch(arguments)
    finally:
        sys.stdout.flush()


def _dispatch(arguments: Sequence[str]) -> int:
    if arguments and arguments[0] in VERBS:
        verb = import_module(f"topg.cli.{arguments[0]}")
        args = verb_parser(arguments[0], verb).parse_args(arguments[1:])
        return _print_config(args) if getattr(args, "print_config", False) else int(verb.run(args) or 0)
    parser = top_parser()
    parser.parse_args(arguments)  # leaves the process for --help, --version and anything unknown
    parser.print_help(sys.stderr)
    return EXIT_USAGE


def _print_config(args: argparse.Namespace) -> int:
    from topg.cli.options import config_from

    print(config_from(args))
    return 0


def top_parser() -> argparse.ArgumentParser:
    """The parser of `topg` itself; it knows the verbs by name only."""
    parser = argparse.ArgumentParser(
        prog="topg", usage="topg [-h] [--version] VERB ...", formatter_class=_Formatter, allow_abbrev=False,
        description="Inference for large language models.", epilog="`topg VERB --help` explains a verb.",
    )  # fmt: skip
    parser.add_argument("--version", action="version", version=f"topg {__version__}")
    verbs = parser.add_subparsers(title="verbs", metavar="VERB")
    for name in VERBS:
        verbs.add_parser(name, help=verb_help(name), add_help=False)
    return parser


def verb_parser(name: str, verb: ModuleType) -> argparse.ArgumentParser:
    """The parser of one verb."""
    parser = argparse.ArgumentParser(
        prog=f"topg {name}", description=verb.HELP, formatter_class=_Formatter, allow_abbrev=False
    )
    verb.add_arguments(parser)
    return parser


def verb_help(name: str) -> str:
    """The HELP line of a verb, read from its source: importing every verb would make `topg --help` slow."""
    source = Path(__file__).with_name(f"{name}.py").read_text(encoding="utf-8")
    for statement in ast.parse(source).body:
        if isinstance(statement, ast.Assign) and [ast.unparse(target) for target in statement.targets] == ["HELP"]:
            return str(ast.literal_eval(statement.value))
    raise RuntimeError(f"topg/cli/{name}.py has no HELP line")


class _Formatter(argparse.RawDescriptionHelpFormatter):
    """Help of the same width everywhere: the documentation holds it word for word."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, width=HELP_WIDTH, max_help_position=30)


if __name__ == "__main__":
    sys.exit(main())
