"""What a plan costs: bytes of weights and KV cache and operations per step, op by op."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import groupby

from topg import ops
from topg.plan import Plan
from topg.precision.formats import Precision

_LAYER = re.compile(r"layers\.(\d+)\.")


@dataclass(frozen=True)
class TensorInfo:
    """Shape and precision of a tensor, all that costs depend on."""

    shape: tuple[int, ...]
    precision: Precision

    @property
    def nbytes(self) -> int:
        return self.precision.nbytes(self.shape)


@dataclass(frozen=True)
class OpCost:
    """One line of the cost table.

    weight_bytes  stored size of the op's tensors; a tied head counts where it is used first, and reads it again
    kv_bytes      keys and values the op reads from the cache in this step
    flops         operations of the step
    output        (rows, width) of the buffer it writes
    """

    name: str
    kind: str
    output: tuple[int, int]
    weight_shape: tuple[int, ...] | None
    precision: str
    weight_bytes: int
    kv_bytes: int
    flops: int

    @property
    def layer(self) -> int | None:
        """Index of the layer the op stands in."""
        match = _LAYER.match(self.name)
        return int(match[1]) if match else None

    def like(self) -> OpCost:
        """The same line without the layer's number, to compare layers."""
        return replace(self, name=_LAYER.sub("layers.*.", self.name))


def plan_cost(plan: Plan, tensors: Mapping[str, TensorInfo], work: ops.Workload, kv_value_bytes: int) -> list[OpCost]:
    """The cost of every op of `plan` for a step of size `work`; `kv_value_bytes` is the width of a cached value."""
    lines, selected, counted = [], False, set[str]()
    for op in plan.ops:
        selected = selected or isinstance(op, ops.SelectRows)
        step = replace(work, tokens=work.logits_rows) if selected else work
        names = op.tensors()
        weight = tensors[names[0]] if names else None
        lines.append(
            OpCost(
                name=op.name,
                kind=op.kind,
                output=(step.tokens, plan.buffers[op.output]),
                weight_shape=weight.shape if weight else None,
                precision=weight.precision.describe() if weight else "",
                weight_bytes=sum(tensors[name].nbytes for name in names if name not in counted),
                kv_bytes=_kv_bytes(op, work, kv_value_bytes) if isinstance(op, ops.Attention) else 0,
                flops=op.flops(step),
            )
        )
        counted.update(names)
    return lines


def _kv_bytes(op: ops.Attention, work: ops.Workload, kv_value_bytes: int) -> int:
    visible = work.context + work.tokens
    if op.window is not None:
        visible = min(visible, op.window + work.tokens - 1)
    return 2 * visible * op.kv_heads * op.head_dim * kv_value_bytes


@dataclass(frozen=True)
class Block:
    """Lines of one layer and how many consecutive layers cost the same, or lines outside the layers."""

    lines: tuple[OpCost, ...]
    first: int | None
    repeats: int


def folded(lines: list[OpCost]) -> Iterator[Block]:
    """The table with runs of equal layers folded into one block."""
    blocks = [Block(tuple(group), layer, 1) for layer, group in groupby(lines, key=lambda line: line.layer)]
    for _, run in groupby(blocks, key=_block_key):
        same = list(run)
        yield replace(same[0], repeats=len(same))


def _block_key(block: Block) -> tuple[object, ...]:
    return (block.first is None, *(line.like() for line in block.lines))


def human_bytes(count: int) -> str:
    """A size in decimal units, three digits: "1.23 MB"."""
    return _human(count, ("B", "kB", "MB", "GB", "TB"))


def human_count(count: int) -> str:
    """A count in decimal units, three digits: "1.23 G"."""
    return _human(count, ("", "k", "M", "G", "T", "P")).strip()


def _human(count: int, units: tuple[str, ...]) -> str:
    step = min(int(math.log(count, 1000)), len(units) - 1) if count >= 1000 else 0
    return f"{count:,} {units[0]}" if step == 0 else f"{count / 1000**step:.3g} {units[step]}"
