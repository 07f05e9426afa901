"""Writes docs/config.md and docs/cli.md from the settings and the parsers: `python -m topg.cli.reference docs`.

A test compares the files with what this module makes, so that they cannot go stale.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

from topg.cli.main import VERBS, top_parser, verb_parser
from topg.config import CONFIG_VARIABLE, HOME_VARIABLE, SECTIONS, SETTINGS, Setting
from topg.config_kinds import Switch

NOTE = "<!-- Written by `python -m topg.cli.reference docs`; change the source instead. -->"

CONFIG_INTRO = f"""# Configuration

{NOTE}

A value comes from the first of these that has it: **flag** (or keyword of `topg.LLM`), **environment variable**,
**configuration file**, **default**. `false` and `0` are values like any other.

The file is named with `--config FILE` or `{CONFIG_VARIABLE}`; no other place is looked at.
[`config/tuning.yaml`](../config/tuning.yaml) is a file with every key at its default.

`{HOME_VARIABLE}` names the folder for pulled and converted models; the default is `$XDG_CACHE_HOME/topg`, else
`~/.cache/topg`.

## How values are written

* Sizes, shares and durations carry a unit: `4MB`, `512KiB`, `80%`, `50ms`. `kB`, `MB`, `GB`, `TB` count in thousands
  (1 MB is 1,000,000 bytes), `KiB`, `MiB`, `GiB`, `TiB` in 1024s.
* A switch is `true` or `false`, in a file without quotes. `yes`, `no`, `on` and `off` are words, not switches.
* A whole number has digits only: no underscores, no leading zeros, in a file no quotes.
* A file is YAML with two levels, indented with spaces. An empty file or an empty section sets nothing.
* An unknown or repeated key, an unknown variable that begins with a section's name (`TOPG_MEMORY_...`), a wrong type
  and a value out of range stop the start; the message names the key and the file and line, variable or flag.

`--print-config` shows every setting in force and where it came from, and does nothing else.
"""


def config_reference() -> str:
    """The text of docs/config.md."""
    return "\n".join([CONFIG_INTRO, *_config_sections()])


def cli_reference() -> str:
    """The text of docs/cli.md: the help of `topg` and of every verb, word for word."""
    helps = [("topg", top_parser().format_help())]
    helps += [(f"topg {name}", verb_parser(name, import_module(f"topg.cli.{name}")).format_help()) for name in VERBS]
    blocks = (f"\n## `{title}`\n\n```text\n{text.rstrip()}\n```\n" for title, text in helps)
    status = "Exit status: 0 done, 1 an error (one line on standard error), 2 wrong usage, 130 interrupted.\n"
    return "".join([f"# Command line\n\n{NOTE}\n\n{status}", *blocks])


def main(arguments: list[str]) -> int:
    """Write both files into the folder given."""
    if len(arguments) != 1 or not Path(arguments[0]).is_dir():
        print("usage: python -m topg.cli.reference FOLDER", file=sys.stderr)
        return 2
    for name, text in (("config.md", config_reference()), ("cli.md", cli_reference())):
        Path(arguments[0], name).write_text(text, encoding="utf-8")
    return 0


def _config_sections() -> Iterator[str]:
    for section in SECTIONS:
        yield f"## `{section}`\n"
        for setting in SETTINGS.values():
            if setting.section == section:
                yield _config_entry(setting)


def _config_entry(setting: Setting[object]) -> str:
    negated = f", `--no-{setting.flag.removeprefix('--')}`" if isinstance(setting.kind, Switch) else ""
    return (
        f"### `{setting.key}`\n\n{setting.help}\n\n"
        f"* Default: `{setting.kind.show(setting.default)}`\n"
        f"* Allowed: {setting.kind.allowed()}\n"
        f"* Variable: `{setting.variable}`\n"
        f"* Flag: `{setting.flag}`{negated}\n"
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
