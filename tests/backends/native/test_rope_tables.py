"""Tables of angles: long enough for every step, and the same values whoever asked first."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from topg.backends.native.rope_tables import BLOCK_POSITIONS, RopeTables
from topg.ops import Rope
from topg.ops.rope import DynamicScaling, YarnScaling

ROPES = (Rope(16, 10000.0), Rope(8, 1e6, YarnScaling(4.0, 64)), Rope(64, 10000.0, DynamicScaling(2.0, 700)))


class FakeEngine:
    """Keeps the last table of each rope, and counts how many values it was given."""

    def __init__(self) -> None:
        self.tables: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        self.copied = 0

    def set_rope(self, identity: int, cos: np.ndarray, sin: np.ndarray) -> None:
        self.tables[identity] = cos, sin
        self.copied += cos.size


def tables(*asked: int) -> Any:
    engine = FakeEngine()
    kept = RopeTables(engine, {rope: index for index, rope in enumerate(ROPES)})  # type: ignore[arg-type]
    for positions in asked:
        kept.cover(positions)
    return engine


def test_values_do_not_depend_on_who_asked() -> None:
    at_once, step_by_step = tables(3000), tables(1, 500, 513, 514, 1700, 3000)
    for index, rope in enumerate(ROPES):
        for one, other in zip(at_once.tables[index], step_by_step.tables[index], strict=True):
            np.testing.assert_array_equal(one[:3000].view(np.uint32), other[:3000].view(np.uint32))
        angles = rope.angles(np.arange(3000))
        cos, sin = at_once.tables[index]
        np.testing.assert_allclose(cos[:3000], np.cos(angles) * rope.attention_factor, atol=1e-6)
        np.testing.assert_allclose(sin[:3000], np.sin(angles) * rope.attention_factor, atol=1e-6)


@pytest.mark.parametrize("positions", [1, BLOCK_POSITIONS, BLOCK_POSITIONS + 1])
def test_tables_reach_as_far_as_asked(positions: int) -> None:
    assert all(len(cos) >= positions for cos, _ in tables(positions).tables.values())


def test_a_growing_sequence_copies_little() -> None:
    engine = tables(*range(1, 20_000, 100))
    assert engine.copied < 3 * sum(cos.size for cos, _ in engine.tables.values())
