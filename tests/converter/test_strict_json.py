from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import pytest

from topg.converter.huggingface import MAX_INDEX_BYTES
from topg.converter.strict_json import MAX_VALUES, parse, read_object
from topg.errors import CheckpointError


@dataclass(frozen=True)
class Circle:
    kind: ClassVar[str] = "circle"
    radius: float


@dataclass(frozen=True)
class Square:
    kind: ClassVar[str] = "square"
    side: int


@dataclass(frozen=True)
class Drawing:
    title: str
    colour: Literal["red", "blue"]
    shapes: Mapping[str, Circle | Square | None]
    points: tuple[int, ...] = ()


GOOD: dict[str, Any] = {
    "title": "x", "colour": "red",
    "shapes": {"a": {"kind": "circle", "radius": 1}, "b": {"kind": "square", "side": 2}, "c": None}, "points": [1, 2],
}  # fmt: skip


def test_builds_what_the_types_say() -> None:
    drawing = parse(Drawing, GOOD, "drawing")
    assert drawing == Drawing("x", "red", {"a": Circle(1.0), "b": Square(2), "c": None}, (1, 2))
    circle = drawing.shapes["a"]
    assert isinstance(circle, Circle) and type(circle.radius) is float


def test_fields_with_defaults_may_be_absent() -> None:
    assert parse(Drawing, {key: GOOD[key] for key in GOOD if key != "points"}, "drawing").points == ()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"title": 1}, r"drawing\.title must be str, not 1"),
        ({"title": None}, r"drawing\.title must be str, not None"),
        ({"colour": "green"}, r"drawing\.colour must be one of red, blue, not 'green'"),
        ({"colour": ["red"]}, r"drawing\.colour must be one of"),
        ({"shapes": []}, r"drawing\.shapes must be an object"),
        ({"shapes": {"a": {"kind": "circle"}}}, r"drawing\.shapes\['a'\]\.radius is missing"),
        ({"shapes": {"a": {"radius": 1.0}}}, r"drawing\.shapes\['a'\]\.kind must be one of circle, square"),
        ({"shapes": {"a": {"kind": [], "radius": 1.0}}}, r"drawing\.shapes\['a'\]\.kind must be one of circle, square"),
        ({"shapes": {"a": {"kind": "square", "side": 2.0}}}, r"drawing\.shapes\['a'\]\.side must be int, not 2\.0"),
        ({"points": "12"}, r"drawing\.points must be a list"),
        ({"points": [1, True]}, r"drawing\.points\[1\] must be int, not True"),
        ({"points": [-1]}, r"drawing\.points\[0\] must be between 0 and"),
        ({"points": [2**60]}, r"drawing\.points\[0\] must be between 0 and"),
        ({"extra": 1}, r"drawing has no key 'extra'; keys: title, colour, shapes, points"),
    ],
)
def test_names_the_key_at_fault(change: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        parse(Drawing, GOOD | change, "drawing")


def test_long_values_are_shortened_in_messages() -> None:
    with pytest.raises(CheckpointError) as caught:
        parse(int, "x" * 10_000, "key")
    assert len(str(caught.value)) < 120


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[1]",
        '{"a": 1, "a": 1}',
        '{"a": {"b": 1, "c": 2, "b": 3}}',
        '{"a": NaN}',
        '{"a": Infinity}',
        '{"a": 1',
        "[" * 100_000,
        '{"a": ' + "9" * 5000 + "}",
        "\xff",
    ],
)
def test_refuses_what_is_no_json_object(tmp_path: Path, text: str) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(CheckpointError, match=r"config\.json"):
        read_object(path, 1 << 20)


def test_size_is_bounded(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text('{"a": "' + "x" * 100 + '"}')
    with pytest.raises(CheckpointError, match="at most 50 are read"):
        read_object(path, 50)


@pytest.mark.parametrize("item", ["[]", "{}", "1", '"a"'])
def test_more_values_than_a_model_needs_are_refused_unread(tmp_path: Path, item: str) -> None:
    path = tmp_path / "config.json"
    path.write_text('{"a": [' + f"{item}," * MAX_VALUES + "1]}")
    with pytest.raises(CheckpointError, match="holds more than 1,048,576 values"):
        read_object(path, 16 << 20)


def test_the_index_of_a_hundred_thousand_tensors_is_read(tmp_path: Path) -> None:
    name = "model.layers.{0}.mlp.experts.{0}.down_proj.weight"
    weight_map = {name.format(number): "model-00001-of-00163.safetensors" for number in range(100_000)}
    path = tmp_path / "model.safetensors.index.json"
    path.write_text(json.dumps({"weight_map": weight_map}))
    assert read_object(path, MAX_INDEX_BYTES)["weight_map"] == weight_map
