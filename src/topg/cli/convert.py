"""`topg convert`: a checkpoint into the form that ToPG runs."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from topg.precision.recipes import DEFAULT_RECIPE, RECIPE_NAMES
from topg.units import format_size

if TYPE_CHECKING:
    from topg.converter.convert import Conversion

HELP = "convert a checkpoint or GGUF file into the form that ToPG runs"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of the verb."""
    parser.add_argument("source", metavar="SRC", help="name of a pulled model, Hugging Face folder, or GGUF file")
    parser.add_argument("output", metavar="OUT", type=Path, help="the folder to write; it must not exist yet")
    parser.add_argument(
        "--quant", metavar="RECIPE", default=DEFAULT_RECIPE, choices=RECIPE_NAMES,
        help=f"precision of the weights: {', '.join(RECIPE_NAMES)} (default: {DEFAULT_RECIPE})",
    )  # fmt: skip
    parser.add_argument("--overwrite", action="store_true", help="replace OUT if it is a converted model")


def run(args: argparse.Namespace) -> int:
    """Convert, and say what came out."""
    from topg.converter import ModelConverter

    started = time.monotonic()
    with _progress_bar() as progress:
        conversion = ModelConverter(
            args.source, args.output, args.quant, overwrite=args.overwrite, progress=progress
        ).run()
    for warning in conversion.warnings:
        print(f"warning: {warning}", file=sys.stderr)
    print(_summary(conversion, time.monotonic() - started))
    return 0


def _summary(conversion: Conversion, seconds: float) -> str:
    before, after = conversion.source_bytes, conversion.nbytes
    return (
        f"{conversion.path}: {conversion.recipe}, {format_size(before)} -> {format_size(after)}"
        f" ({after / before:.0%}) in {seconds:.1f} s"
    )


@contextmanager
def _progress_bar() -> Iterator[Callable[[int, int], None] | None]:
    """A progress callback that draws a bar on a terminal; None where there is none."""
    if not sys.stderr.isatty():
        yield None
        return
    from tqdm import tqdm

    with tqdm(unit="B", unit_scale=True, desc="converting", file=sys.stderr) as bar:

        def show(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        yield show
