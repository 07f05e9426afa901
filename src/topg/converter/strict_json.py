"""Strict reading of JSON into frozen dataclasses: every key known, none missing, every value of its declared type.

`parse(Point, {"x": 1}, "point")` fails with "point.y is missing": a damaged or hostile file is refused by the name of
the key at fault, before anything uses a value from it.
"""

from __future__ import annotations

import json
import types
from collections import Counter
from collections.abc import Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal, NoReturn, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from topg.errors import CheckpointError
from topg.wording import shown

LARGEST_INTEGER = 2**53

MAX_VALUES = 1 << 20

T = TypeVar("T")


def read_object(path: Path, max_bytes: int) -> dict[str, Any]:
    """The JSON object in a file of at most `max_bytes`; raises CheckpointError when it is not one."""
    size = path.stat().st_size
    if size > max_bytes:
        raise CheckpointError(f"{path} has {size} bytes; at most {max_bytes} are read")
    return parse_object(path.read_bytes(), str(path))


def parse_object(text: bytes, what: str) -> dict[str, Any]:
    """The JSON object in `text`, called `what` in messages; raises CheckpointError when it is not one.

    A key that occurs twice is refused: other readers would take either value.  So are texts with more values than any
    model needs: a few megabytes of empty lists become hundreds in memory.
    """
    if sum(text.count(mark) for mark in (b"[", b"{", b":", b",")) > MAX_VALUES:
        raise CheckpointError(f"{what} holds more than {MAX_VALUES:,} values; no model needs that many")
    try:
        data = json.loads(text.decode(), object_pairs_hook=_unique_keys, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:  # ValueError covers bad UTF-8, bad JSON, NaN and huge numbers
        raise CheckpointError(f"{what} is not valid JSON: {error or 'nested too deeply'}") from error
    if not isinstance(data, dict):
        raise CheckpointError(f"{what} must hold a JSON object, not {type(data).__name__}")
    return data


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        repeated = next(name for name, count in Counter(name for name, _ in pairs).items() if count > 1)
        raise ValueError(f"{shown(repeated)} occurs twice")
    return result


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


def parse(annotation: type[T], value: Any, key: str) -> T:
    """`value` as the type `annotation` says, all the way down; raises CheckpointError naming the key at fault.

    Known types: bool, int (0 or more), float, str, None, Any, unions, Literal, tuple[T, ...], Mapping[str, T] and
    dataclasses.  In a union of dataclasses the value's "kind" picks the one with that `kind` attribute.
    """
    return cast(T, _parse(annotation, value, key))


def _parse(annotation: Any, value: Any, key: str) -> Any:
    origin = get_origin(annotation)
    if origin in (Union, types.UnionType):
        return _parse_union(get_args(annotation), value, key)
    if origin is Literal:
        return _parse_literal(get_args(annotation), value, key)
    if origin is tuple:
        return _parse_tuple(get_args(annotation)[0], value, key)
    if origin is Mapping:
        return _parse_mapping(get_args(annotation)[1], value, key)
    if is_dataclass(annotation):
        return _parse_dataclass(annotation, value, key)
    return _parse_scalar(annotation, value, key)


def _parse_scalar(annotation: Any, value: Any, key: str) -> Any:
    if annotation is Any or (annotation is types.NoneType and value is None):
        return value
    if annotation is float and type(value) is int:
        return float(value)
    if type(value) is not annotation:  # `type` and not isinstance: True is no integer here
        _refuse(key, getattr(annotation, "__name__", str(annotation)), value)
    if annotation is int and not 0 <= value <= LARGEST_INTEGER:
        _refuse(key, f"between 0 and {LARGEST_INTEGER}", value)
    return value


def _parse_union(members: tuple[Any, ...], value: Any, key: str) -> Any:
    if value is None and types.NoneType in members:
        return None
    members = tuple(member for member in members if member is not types.NoneType)
    if len(members) == 1:
        return _parse(members[0], value, key)
    by_kind = {member.kind: member for member in members}
    attributes = dict(_mapping(value, key))
    kind = _parse_literal(tuple(by_kind), attributes.pop("kind", None), f"{key}.kind")
    return _parse(by_kind[kind], attributes, key)


def _parse_literal(allowed: tuple[Any, ...], value: Any, key: str) -> Any:
    if not any(type(value) is type(word) and value == word for word in allowed):
        _refuse(key, f"one of {', '.join(map(str, allowed))}", value)
    return value


def _parse_tuple(member: Any, value: Any, key: str) -> tuple[Any, ...]:
    if not isinstance(value, list | tuple):
        _refuse(key, "a list", value)
    return tuple(_parse(member, item, f"{key}[{index}]") for index, item in enumerate(value))


def _parse_mapping(member: Any, value: Any, key: str) -> dict[str, Any]:
    return {name: _parse(member, item, f"{key}[{shown(name)}]") for name, item in _mapping(value, key).items()}


def _parse_dataclass(cls: Any, value: Any, key: str) -> Any:
    data = _mapping(value, key)
    known = {field.name: field for field in fields(cls)}
    for name in data:
        if name not in known:
            raise CheckpointError(f"{key} has no key {shown(name)}; keys: {', '.join(known)}")
    for name, field in known.items():
        if name not in data and not _has_default(field):
            raise CheckpointError(f"{key}.{name} is missing")
    hints = _hints(cls)
    return cls(**{name: _parse(hints[name], item, f"{key}.{name}") for name, item in data.items()})


@cache
def _hints(cls: type) -> dict[str, Any]:
    return get_type_hints(cls)


def _has_default(field: Field[Any]) -> bool:
    return field.default is not MISSING or field.default_factory is not MISSING


def _mapping(value: Any, key: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        _refuse(key, "an object", value)
    return cast(Mapping[str, Any], value)


def _refuse(key: str, wanted: str, value: Any) -> NoReturn:
    raise CheckpointError(f"{key} must be {wanted}, not {shown(value)}")
