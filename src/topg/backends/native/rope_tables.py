"""Rotation angles of the native engine, computed when a step first reaches their positions."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from topg import _native
from topg.ops import Rope

# Angles are computed in blocks that start at multiples of this, whoever asks: numpy may round the last elements of an
# array differently, and a position must always get the same bits.
BLOCK_POSITIONS = 512

FloatArray = npt.NDArray[np.float32]


class RopeTables:
    """Keeps the cos and sin tables of an engine long enough; `ropes` maps each rope to the engine's id for it."""

    def __init__(self, engine: _native.Engine, ropes: Mapping[Rope, int]) -> None:
        self._engine = engine
        self._tables = [(rope, identity, _Table(rope)) for rope, identity in ropes.items()]
        self._positions = 0

    def cover(self, positions: int) -> None:
        """Make sure that all positions below `positions` have angles."""
        if positions <= self._positions:
            return
        # At least twice as many, so that all copies of a growing table together cost no more than its last one.
        self._positions = -(-max(positions, 2 * self._positions) // BLOCK_POSITIONS) * BLOCK_POSITIONS
        for _, identity, table in self._tables:
            table.extend(self._positions)
            self._engine.set_rope(identity, table.cos, table.sin)


class _Table:
    """cos and sin [positions, dim / 2] of one rope."""

    def __init__(self, rope: Rope) -> None:
        self._rope = rope
        self.cos = self.sin = np.empty((0, rope.dim // 2), np.float32)

    def extend(self, positions: int) -> None:
        """Add whole blocks until `positions`, a multiple of the block, is reached."""
        angles = [
            self._rope.angles(np.arange(start, start + BLOCK_POSITIONS))
            for start in range(len(self.cos), positions, BLOCK_POSITIONS)
        ]
        factor = np.float32(self._rope.attention_factor)
        self.cos = np.concatenate([self.cos, *(np.cos(block).astype(np.float32) * factor for block in angles)])
        self.sin = np.concatenate([self.sin, *(np.sin(block).astype(np.float32) * factor for block in angles)])
