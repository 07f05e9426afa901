"""Who reads what: a plan's ops over values instead of buffers.

A plan writes the same few buffers again and again.  A value is what one op wrote, known by that op's index, and never
changes; whether an op may be fused or a buffer reused is a question about values.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain, count
from typing import Generic, TypeVar

from topg.ops import Op

Kind = TypeVar("Kind")


class Dataflow:
    """`inputs[i]` are the values op i reads, in the order of `Op.inputs`; `readers[i]` the ops that read value i."""

    def __init__(self, ops: Sequence[Op]) -> None:
        self.inputs: list[tuple[int, ...]] = []
        self.readers: list[list[int]] = [[] for _ in ops]
        latest: dict[str, int] = {}
        for index, op in enumerate(ops):
            self.inputs.append(tuple(latest[name] for name in op.inputs()))
            for value in dict.fromkeys(self.inputs[index]):
                self.readers[value].append(index)
            latest[op.output] = index

    def read_only_by(self, value: int, reader: int) -> bool:
        """Whether one op reads a value and nothing else does."""
        return self.readers[value] == [reader]


class Names(Generic[Kind]):
    """Hands out names of places in memory and takes them back; a place keeps its kind (a width, a form) for ever."""

    def __init__(self) -> None:
        self.kinds: dict[str, Kind] = {}
        self._taken: set[str] = set()

    def take(self, wish: str, kind: Kind) -> str:
        """`wish`, or with a number behind it where that is taken or of another kind."""
        name = next(name for name in _candidates(wish) if self._fits(name, kind))
        self.kinds[name] = kind
        self._taken.add(name)
        return name

    def release(self, name: str) -> None:
        self._taken.discard(name)

    def _fits(self, name: str, kind: Kind) -> bool:
        return name not in self._taken and self.kinds.get(name, kind) == kind


def _candidates(wish: str) -> Iterator[str]:
    return chain([wish], (f"{wish}#{number}" for number in count(2)))
