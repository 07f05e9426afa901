"""Which kernels a program runs on, for people: the steps of a plan with what was fused in each."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from topg import _native
from topg.backends.native import program as native
from topg.precision.formats import Precision

_LAYER = re.compile(r"layers\.(\d+)\.")


@dataclass(frozen=True)
class StepLine:
    """One step: the plan ops it computes, without their layer's prefix, and its kernels, each once."""

    layer: int | None
    kind: str
    plan_ops: tuple[str, ...]
    kernels: tuple[str, ...]


@dataclass(frozen=True)
class LayerLines:
    """The steps of one layer, or of what stands outside the layers, and the last layer of a run that has the same."""

    first: int | None
    last: int | None
    lines: tuple[StepLine, ...]


def linear_kernel(precision: Precision, isa: str) -> str:
    """Name of the kernel that multiplies with weights of a precision; empty when there is none."""
    name, _ = _native.linear_kernel(
        isa, precision.weights, precision.activations, precision.scale or "none", precision.group_size or 0,
        precision.minimum,
    )  # fmt: skip
    return name


def kernel_lines(program: native.Program, precision: Callable[[str], Precision], isa: str) -> Iterator[LayerLines]:
    """A line for each step of a program; layers that follow one another and are alike are shown once."""
    lines = _lines(program, precision, isa)
    layers = [(layer, tuple(group)) for layer, group in groupby(lines, key=lambda line: line.layer)]
    for _, run in groupby(layers, key=lambda item: tuple((line.kind, line.plan_ops, line.kernels) for line in item[1])):
        same = list(run)
        yield LayerLines(same[0][0], same[-1][0], same[0][1])


def _lines(program: native.Program, precision: Callable[[str], Precision], isa: str) -> Iterator[StepLine]:
    layer: int | None = None
    for step in program.steps:
        if step.plan_ops:
            found = _LAYER.match(step.plan_ops[-1])
            layer = int(found[1]) if found else None
        names = tuple(_LAYER.sub("", name) for name in step.plan_ops)
        yield StepLine(layer, _kind(step), names, _kernels(step, precision, isa))


def _kind(step: native.Step) -> str:
    return type(step).__name__.removesuffix("Step").lower()


def _kernels(step: native.Step, precision: Callable[[str], Precision], isa: str) -> tuple[str, ...]:
    match step:
        case native.LinearStep():
            epilogues = ["heads"] if step.heads else [part.epilogue for part in step.parts if part.epilogue != "store"]
            weights = [linear_kernel(precision(part.weights[0]), isa) for part in step.parts]
            return _once([*weights, *epilogues])
        case native.LogitsStep():
            return (linear_kernel(precision(step.weight), isa),)
        case native.RowStep():
            return _once([type(op).__name__.removesuffix("Op").lower() for op in step.ops])
        case native.AttentionStep():
            return ("attention",)


def _once(names: Sequence[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(names))
