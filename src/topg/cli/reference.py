"""Writes docs/config.md and docs/cli.md from the settings and the parsers: `python -m topg.cli.reference docs`.

A test compares the files with what this module makes, so that they cannot go stale.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

from topg.cli.main import VERBS, top_parser, verb_parser
from topg.config import CONFIG_VARIABLE, HOME_VARIABLE, ISA_VARIABLE, SECTIONS, SETTINGS, Setting
from topg.config_kinds import Switch

NOTE = "<!-- Written by `python -m topg.cli.reference docs`; change the source instead. -->"

CONFIG_INTRO = f"""# Configuration

{NOTE}

A value comes from the first of these that has it: **flag**, **environment variable**, **configuration file**,
**default**. `false` and `0` are values like any other.

The file is named with `--config FILE` or `{CONFIG_VARIABLE}`; no other place is looked at.
[`config/tuning.yaml`](../config/tuning.yaml) is a file with every key at its default.

`{HOME_VARIABLE}` names the folder for pulled and converted models; the default is `$XDG_CACHE_HOME/topg`, else
`~/.cache/topg`. A relative path counts from the folder in which the command runs.

`{ISA_VARIABLE}` names the instruction set of the native kernels; the default is the best one that the processor has.
`topg doctor` shows which it can run.

## From Python

`topg.LLM(name)` reads the same variables and the same file. Two settings are keywords of it, and go before everything
else: `max_context` and `max_batch_size`. The others are given as a configuration, which then stands alone:

```python
from topg import LLM
from topg.config import resolve

llm = LLM("smollm2-135m", config=resolve({{"memory.page_size": "8MB"}}).config)
```

Keys and values are those of a file. `resolve(settings, os.environ, Path("tuning.yaml"))` puts the settings over the
variables and a file, as flags are put over them.

## How values are written

* Sizes and shares carry a unit: `4MB`, `512KiB`, `80%`. `kB`, `MB`, `GB`, `TB` count in thousands
  (1 MB is 1,000,000 bytes), `KiB`, `MiB`, `GiB`, `TiB` in 1024s.
* A switch is `true` or `false`, in a file without quotes. `yes`, `no`, `on` and `off` are words, not switches.
* A whole number has the digits 0 to 9 only, for any flag and variable too: no underscores, no plus sign, no spaces, no
  leading zeros, in a file no quotes.
* A file is YAML with two levels, indented with spaces. An empty file or an empty section sets nothing.
* An unknown or repeated key, an unknown variable that begins with `TOPG_` (upper case, as all of them), a wrong type
  and a value out of range stop the start; the message names the key and the file and line, variable or flag.
* The configuration file is a regular file, no pipe or device.

`--print-config` shows every setting in force and where it came from, and does nothing else;
no model need be named.
"""

CLI_INTRO = f"""# Command line

{NOTE}

| exit status | meaning |
|---|---|
| 0 | done |
| 1 | any error that is not one of the following: a model, a file, the network, memory |
| 2 | what was asked for is wrong: a verb, a flag or its value, a `TOPG_` variable, the configuration, the request |
| 130 | interrupted |

An error is one line on standard error. It does not matter when a bad value is found: a prompt that is too long for the
model ends with 2 as an unknown flag does.
"""


def config_reference() -> str:
    """The text of docs/config.md."""
    return "\n".join([CONFIG_INTRO, *_config_sections()])


def cli_reference() -> str:
    """The text of docs/cli.md: the help of `topg` and of every verb, word for word."""
    helps = [("topg", top_parser().format_help())]
    helps += [(f"topg {name}", verb_parser(name, import_module(f"topg.cli.{name}")).format_help()) for name in VERBS]
    blocks = (f"\n## `{title}`\n\n```text\n{text.rstrip()}\n```\n" for title, text in helps)
    return "".join([CLI_INTRO, *blocks])


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
