"""`topg doctor`: what the native back end makes of this machine, and of a model on it."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterable, Mapping
from importlib.util import find_spec
from typing import TYPE_CHECKING

from topg.cli.options import filled
from topg.cli.sampling_options import add_quant_argument
from topg.config import ISA_VARIABLE
from topg.plan_cost import human_count

if TYPE_CHECKING:
    from topg.backends.native.kernel_names import LayerLines

LIMITS_EXPLAINED = (
    "Limits are measured in half a second with the threads named; other programs on the machine lower them."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of the verb."""
    parser.add_argument(
        "model", nargs="?", type=filled, metavar="MODEL",
        help="show the kernels of this model too: a pulled name, a converted folder, a checkpoint or a GGUF file",
    )  # fmt: skip
    add_quant_argument(parser)
    parser.epilog = LIMITS_EXPLAINED


def run(args: argparse.Namespace) -> int:
    """Look at the machine, and at the model if there is one."""
    from topg import _native
    from topg.backends import backend_type
    from topg.backends.native.machine import Machine

    backend_type("native")  # says what to do where it is missing or TOPG_ISA is wrong
    machine, isa = Machine.detect(), _native.isa_for(os.environ.get(ISA_VARIABLE, ""))
    limits = _native.measure_limits(isa, machine.default_threads)
    _print_table(
        _machine_rows(machine.model, isa, _native.usable_isas(), machine.default_threads, machine.reason, limits)
    )
    if args.model is not None:
        print()
        _print_kernels(args.model, args.quant, isa)
    return 0


def _machine_rows(
    processor: str, isa: str, usable: list[str], threads: int, reason: str, limits: Mapping[str, float]
) -> list[tuple[str, str]]:
    asked = os.environ.get(ISA_VARIABLE)
    others = ", ".join(name for name in usable if name != isa) or "none"
    why = f"{ISA_VARIABLE} asks for it" if asked else "the best this processor can run"
    torch = "installed" if find_spec("torch") else "not installed; pip install 'topg[torch]' for a GPU"
    return [
        ("processor", processor),
        ("instructions", f"{isa}: {why}; it can also run: {others}"),
        ("threads", f"{threads}: {reason}"),
        ("memory read", f"{limits['read_bytes_per_second'] / 1e9:.1f} GB/s"),
        ("int8", f"{human_count(int(limits['int8_ops_per_second']))} operations/s"),
        ("bfloat16", f"{human_count(int(limits['bfloat16_ops_per_second']))} operations/s"),
        ("float32", f"{human_count(int(limits['float32_ops_per_second']))} operations/s"),
        ("barrier", f"{limits['barrier_seconds'] * 1e6:.2f} us for all threads to meet"),
        ("torch", torch),
    ]


def _print_kernels(model: str, quant: str | None, isa: str) -> None:
    from topg.backends.native.compiler import compile_plan
    from topg.backends.native.kernel_names import kernel_lines
    from topg.cli.plan import describe_model

    plan, tensors, _ = describe_model(model, quant)
    program = compile_plan(plan, lambda name: tensors[name].precision)
    rows: list[tuple[str, ...]] = [("step", "kernels", "plan ops")]
    for layer in kernel_lines(program, lambda name: tensors[name].precision, isa):
        rows += _layer_rows(layer)
    _print_table(rows)
    print(f"\n{len(plan.ops)} plan ops in {len(program.steps)} steps")


def _layer_rows(layer: LayerLines) -> Iterable[tuple[str, ...]]:
    if layer.first is not None:
        yield (
            f"layer {layer.first}:" if layer.first == layer.last else f"layers {layer.first} to {layer.last}, each:",
        )
    indent = "  " if layer.first is not None else ""
    for line in layer.lines:
        yield indent + line.kind, " + ".join(line.kernels) or "none", " + ".join(line.plan_ops)


def _print_table(rows: Iterable[tuple[str, ...]]) -> None:
    """Columns as wide as their contents; a row of one cell is a heading."""
    rows = list(rows)
    columns = max(len(row) for row in rows)
    widths = [max(len(row[i]) for row in rows if len(row) == columns) for i in range(columns)]
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=False)] if len(row) > 1 else row
        print("  ".join(cells).rstrip())
