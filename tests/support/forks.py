"""Checks in a forked process."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable


def in_a_fork(function: Callable[[], bool]) -> bool:
    """Whether function() is true in a child process, which ends in time."""
    child = os.fork()
    if child == 0:
        signal.alarm(20)
        result = 1
        try:
            result = 0 if function() else 1
        finally:
            os._exit(result)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
