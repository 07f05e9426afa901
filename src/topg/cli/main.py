"""The command line: `topg VERB`, one file a verb, imported only when it is used.

A verb's module holds `add_arguments(parser)` and `run(args) -> int | None`, the exit status.

Exit status: 0 done, 2 when what was asked for is wrong (flags, configuration, request), 1 any other error,
130 interrupted.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from types import MappingProxyType, ModuleType

from topg import __version__
from topg.cli.messages import explain, say
from topg.cli.parser import EXIT_USAGE, Parser
from topg.errors import ConfigError, RequestError, TopgError
from topg.wording import did_you_mean

# Name and help line of each verb; they stand here, since importing every verb would make `topg --help` slow.
VERBS: Mapping[str, str] = MappingProxyType(
    {
        "pull": "fetch a model into the store",
        "convert": "convert a checkpoint or GGUF file into the form that ToPG runs",
        "plan": "print a model's operations with shapes, bytes and FLOPs",
        "generate": "continue a prompt and print the text as it comes",
        "chat": "talk to a model in the terminal",
        "bench": "measure a model's speed, and what share of the machine that is",
        "doctor": "show what this machine can do, and which kernels a model runs on",
    }
)

EXIT_ERROR = 1
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
    except (ConfigError, RequestError) as error:
        say(f"topg: error: {error}")
        return EXIT_USAGE
    except TopgError as error:
        say(f"topg: error: {error}")
        return EXIT_ERROR
    except OSError as error:
        say(f"topg: error: {explain(error)}")
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
        args = verb_parser(arguments[0], verb).parse(arguments[1:])
        return _print_config(args) if getattr(args, "print_config", False) else int(verb.run(args) or 0)
    parser = top_parser()
    if arguments and not arguments[0].startswith("-"):
        parser.error(f"there is no verb {arguments[0]!r}{did_you_mean(arguments[0], VERBS)}; verbs: {', '.join(VERBS)}")
    parser.parse(arguments)  # leaves the process for --help, --version and anything unknown
    parser.print_help(sys.stderr)
    return EXIT_USAGE


def _print_config(args: argparse.Namespace) -> int:
    from topg.cli.options import config_from

    print(config_from(args))
    return 0


def top_parser() -> Parser:
    """The parser of `topg` itself; it knows the verbs by name only."""
    parser = Parser(
        prog="topg", usage="topg [-h] [--version] VERB ...",
        description="Inference for large language models.", epilog="`topg VERB --help` explains a verb.",
    )  # fmt: skip
    parser.add_argument("--version", action="version", version=f"topg {__version__}")
    verbs = parser.add_subparsers(title="verbs", metavar="VERB")
    for name, help_line in VERBS.items():
        verbs.add_parser(name, help=help_line, add_help=False)
    return parser


def verb_parser(name: str, verb: ModuleType) -> Parser:
    """The parser of one verb."""
    parser = Parser(prog=f"topg {name}", description=VERBS[name])
    verb.add_arguments(parser)
    return parser


if __name__ == "__main__":
    sys.exit(main())
