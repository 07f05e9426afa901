"""Reading a configuration file: YAML, strictly.

Only what the settings need is understood: two levels of keys, and scalars.  Words and numbers follow YAML 1.2, so that
`no` is the text "no" and never a quiet false, and 1_000 is a text and no number.  Every complaint names file and line.
"""

from __future__ import annotations

import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from topg.config_kinds import SWITCH_WORDS, WHOLE_NUMBER
from topg.errors import ConfigError
from topg.wording import did_you_mean

if TYPE_CHECKING:
    import yaml

MAX_FILE_SIZE = 64 * 1024


@dataclass(frozen=True)
class Given:
    """A value someone gave, and where."""

    value: object
    origin: str


def read_config_file(file: Path, known: Mapping[str, tuple[str, str]]) -> dict[str, Given]:
    """The keys of a file, such as {"execution.max_batch_size": Given(8, "tuning.yaml, line 3")}.

    `known` maps each key to its section and name.  An empty file, or an empty section, holds no keys.  Raises
    ConfigError for a file that cannot be read, is no YAML, or holds an unknown or repeated key.
    """
    sections = dict.fromkeys(section for section, _ in known.values())
    given: dict[str, Given] = {}
    for section, (_, node) in _members(file, _root(file), tuple(sections), "section").items():
        names = tuple(name for other, name in known.values() if other == section)
        for name, (line, value) in _members(file, node, names, f"key of {section!r}").items():
            given[f"{section}.{name}"] = Given(_scalar(file, f"{section}.{name}", value), f"{file}, line {line}")
    return given


def _root(file: Path) -> yaml.Node | None:
    import yaml

    text = _text(file)
    try:
        return yaml.compose(text, Loader=_loader())
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        line = f", line {mark.line + 1}" if mark is not None else ""
        tab = "; indent with spaces, not tabs" if "'\\t'" in str(error.problem) else ""
        raise ConfigError(f"{file}{line} is not YAML: {error.problem}{tab}") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{file} is not YAML: {' '.join(str(error).split())}") from error
    except RecursionError:
        raise ConfigError(f"{file} is nested too deeply to be a configuration") from None


def _text(file: Path) -> str:
    try:
        if not stat.S_ISREG(file.stat().st_mode):  # opening a pipe would wait for someone to write into it
            raise ConfigError(f"{file} is a directory, pipe or device, and no configuration; name a file")
        with file.open("rb") as stream:
            data = stream.read(MAX_FILE_SIZE + 1)
    except OSError as error:
        raise ConfigError(f"cannot read the configuration file {file}: {error.strerror}") from error
    if len(data) > MAX_FILE_SIZE:
        raise ConfigError(f"{file} is larger than {MAX_FILE_SIZE} bytes, too large for a configuration")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file} is not UTF-8 text") from error


def _loader() -> type[yaml.SafeLoader]:
    """A loader that types plain scalars as YAML 1.2 does: true and false, whole numbers, the empty value; else text."""
    import re

    import yaml

    class Loader(yaml.SafeLoader):
        yaml_implicit_resolvers = {}  # noqa: RUF012  (PyYAML's way to declare them)

    Loader.add_implicit_resolver("tag:yaml.org,2002:bool", re.compile(f"(?:{'|'.join(SWITCH_WORDS)})\\Z"), list("tTfF"))
    Loader.add_implicit_resolver(
        "tag:yaml.org,2002:int", re.compile(f"(?:{WHOLE_NUMBER.pattern})\\Z"), list("-0123456789")
    )
    Loader.add_implicit_resolver("tag:yaml.org,2002:null", re.compile(r"(?:~|null|)\Z"), ["~", "n", ""])
    return Loader


def _members(file: Path, node: yaml.Node | None, known: tuple[str, ...], what: str) -> dict[str, tuple[int, yaml.Node]]:
    """Line and value of each key of a mapping; an absent or empty node has none."""
    import yaml

    if node is None or _is_null(node):
        return {}
    if not isinstance(node, yaml.MappingNode):
        place = f"{file}, line {node.start_mark.line + 1}"
        raise ConfigError(f"{place}: expected keys, such as '{known[0]}:', each a {what}")
    members: dict[str, tuple[int, yaml.Node]] = {}
    for key_node, value in node.value:
        line = key_node.start_mark.line + 1
        key = str(key_node.value) if isinstance(key_node, yaml.ScalarNode) else "[...]"
        if key not in known:
            nearest = did_you_mean(key, known)
            raise ConfigError(f"{file}, line {line}: {key!r} is not a {what}; known are {', '.join(known)}{nearest}")
        if key in members:
            raise ConfigError(f"{file}, line {line}: {key!r} stands here again, first in line {members[key][0]}")
        members[key] = (line, value)
    return members


def _is_null(node: yaml.Node) -> bool:
    return node.tag == "tag:yaml.org,2002:null"


def _scalar(file: Path, key: str, node: yaml.Node) -> object:
    import yaml

    place = f"{key} ({file}, line {node.start_mark.line + 1})"
    if not isinstance(node, yaml.ScalarNode):
        shape = "a list" if isinstance(node, yaml.SequenceNode) else "a mapping"
        raise ConfigError(f"{place}: {shape} is not allowed; it takes one value")
    text = str(node.value)
    match node.tag.removeprefix("tag:yaml.org,2002:"):
        case "bool" if text in SWITCH_WORDS:
            return SWITCH_WORDS[text]
        case "int" if WHOLE_NUMBER.fullmatch(text):
            return int(text)
        case "null":
            return None
        case "str":
            return text
        case _:
            raise ConfigError(f"{place}: {text!r} with the tag {node.tag!r} is not allowed")
