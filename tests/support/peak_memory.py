"""Peak memory of a test's subprocess."""

from __future__ import annotations

# Code that prints the peak resident memory of the process it runs in, in KiB.  The kernel starts VmHWM anew with each
# program; getrusage would report the peak of the test process that this one was forked from.
PRINT_PEAK = (
    "print(next(int(line.split()[1]) for line in open('/proc/self/status') if line.startswith('VmHWM')), flush=True)"
)
