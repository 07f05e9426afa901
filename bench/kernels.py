"""How fast the native kernels are, as shares of what the machine can do at most in the same moment.

    python bench/kernels.py [--isa amx ...] [--threads 2] [--shape 576x576 ...] [--seconds 0.5] [--json FILE]

Linears from the caches ("hot", many rows) are compared with the peak rate of the processor's multiply instructions,
linears from memory ("streaming", few rows) with the read bandwidth.  The kernel and the limit are measured by turns, a
few milliseconds each, and medians over the turns are printed: neighbours on the machine disturb both alike.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from topg import _native


@dataclass(frozen=True)
class Format:
    """A weight format as the native code names it."""

    name: str
    code: str
    activation: str
    scale: str
    group: int
    minimum: bool = False


FORMATS: Sequence[Format] = (
    Format("int8 g64", "int8", "int8", "bfloat16", 64),
    Format("int8 g32 (Q8_0)", "int8", "int8", "float16", 32),
    Format("int8 g32 min (Q5_K)", "int8", "int8", "float32", 32, minimum=True),
    Format("int8 g16 (Q6_K)", "int8", "int8", "float32", 16),
    Format("int4 g32", "int4", "int8", "float16", 32),
    Format("int4 g32 min (Q4_K)", "int4", "int8", "float32", 32, minimum=True),
    Format("int8 weight only", "int8", "bfloat16", "bfloat16", 64),
    Format("bfloat16", "bfloat16", "bfloat16", "none", 0),
    Format("float32", "float32", "float32", "none", 0),
)
HOT_ROWS = (7, 32, 256)
STREAMING_ROWS = (1, 4, 8, 32)


@dataclass(frozen=True)
class Measurement:
    """One kernel in one situation; rates are operations or bytes per second."""

    kernel: str
    isa: str
    format: str
    shape: str
    rows: int
    compared_with: str
    rate: float
    limit: float
    share: float

    def line(self) -> str:
        unit = "GB/s" if self.compared_with == "bandwidth" else "GOP/s"
        return (
            f"{self.isa:12} {self.format:20} {self.shape:>10} {self.rows:4} rows  "
            f"{self.rate / 1e9:8.1f} of {self.limit / 1e9:8.1f} {unit:5}  {self.share:6.1%}  {self.kernel}"
        )


def _linears(isa: str, options: argparse.Namespace) -> Iterator[Measurement]:
    for form in FORMATS:
        spec = (form.code, form.activation, form.scale, form.group, form.minimum)
        kernel, _ = _native.linear_kernel(isa, *spec)
        if not kernel:
            continue
        for shape in options.shapes:
            channels, columns = (int(size) for size in shape.split("x"))
            for streaming, all_rows in ((False, HOT_ROWS), (True, STREAMING_ROWS)):
                for rows in all_rows:
                    rates = _native.bench_linear(
                        isa, options.threads, *spec, channels, columns, rows, streaming, options.seconds
                    )
                    limit = "bandwidth" if streaming else "peak"
                    yield Measurement(kernel, isa, form.name, shape, rows, limit, **rates)


# Each kind of kernel yields its measurements.
KINDS: Sequence[Callable[[str, argparse.Namespace], Iterator[Measurement]]] = (_linears,)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    usable = _native.usable_isas()
    parser.add_argument("--isa", nargs="+", choices=usable, default=usable[-1:], help="default: the best, %(default)s")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--shape", dest="shapes", nargs="+", default=["576x576"], metavar="CHANNELSxCOLUMNS")
    parser.add_argument("--seconds", type=float, default=0.5, help="for each measurement")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the measurements there")
    return parser.parse_args()


def main() -> None:
    options = _options()
    measurements: list[Measurement] = []
    for isa in options.isa:
        for kind in KINDS:
            for measurement in kind(isa, options):
                print(measurement.line(), flush=True)
                measurements.append(measurement)
    if options.json:
        options.json.write_text(json.dumps([asdict(measurement) for measurement in measurements], indent=2) + "\n")


if __name__ == "__main__":
    main()
