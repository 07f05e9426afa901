"""`topg convert`: a checkpoint into the form that ToPG runs."""

from __future__ import annotations

import argparse
import time
from typing import TYPE_CHECKING

from topg.cli.messages import say
from topg.cli.options import filled, filled_path
from topg.precision.recipes import DEFAULT_RECIPE, RECIPE_NAMES
from topg.progress import progress_bar
from topg.units import format_size

if TYPE_CHECKING:
    from topg.converter.convert import Conversion


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of the verb."""
    parser.add_argument(
        "source", metavar="SRC", type=filled, help="name of a pulled model, Hugging Face folder, or GGUF file"
    )
    parser.add_argument("output", metavar="OUT", type=filled_path, help="the folder to write; it must not exist yet")
    parser.add_argument(
        "--quant", metavar="RECIPE", default=DEFAULT_RECIPE, choices=RECIPE_NAMES,
        help=f"precision of the weights: {', '.join(RECIPE_NAMES)} (default: {DEFAULT_RECIPE})",
    )  # fmt: skip
    parser.add_argument("--overwrite", action="store_true", help="replace OUT if it is a converted model")


def run(args: argparse.Namespace) -> int:
    """Convert, and say what came out."""
    from topg.converter import ModelConverter

    started = time.monotonic()
    with progress_bar() as bar:
        conversion = ModelConverter(
            args.source, args.output, args.quant, overwrite=args.overwrite,
            progress=lambda done, total: bar.show("converting", done, total),
        ).run()  # fmt: skip
    for warning in conversion.warnings:
        say(f"warning: {warning}")
    print(_summary(conversion, time.monotonic() - started))
    return 0


def _summary(conversion: Conversion, seconds: float) -> str:
    before, after = conversion.source_bytes, conversion.nbytes
    return (
        f"{conversion.path}: {conversion.recipe}, {format_size(before)} -> {format_size(after)}"
        f" ({after / before:.0%}) in {seconds:.1f} s"
    )
