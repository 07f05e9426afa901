"""The thread pool, the choice of an instruction set, and the measured limits."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from support.forks import in_a_fork
from topg import _native


@pytest.mark.parametrize("threads", [1, 2, 3, 4, 17, 64])
def test_no_thread_passes_a_barrier_early(threads: int) -> None:
    """More threads than cores included."""
    assert _native.ThreadPool(threads).count_barrier_faults(runs=5, barriers=20) == 0


def test_workers_that_went_to_sleep_are_woken() -> None:
    pool = _native.ThreadPool(3)
    for _ in range(5):
        time.sleep(0.01)
        assert pool.count_barrier_faults(runs=1, barriers=2) == 0


def test_pools_of_several_callers_do_not_meet() -> None:
    faults: list[int] = []
    callers = [
        threading.Thread(target=lambda: faults.append(_native.ThreadPool(3).count_barrier_faults(10, 20)))
        for _ in range(4)
    ]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert faults == [0] * 4


def test_callers_of_one_pool_wait_for_each_other() -> None:
    pool = _native.ThreadPool(2)
    faults: list[int] = []
    callers = [threading.Thread(target=lambda: faults.append(pool.count_barrier_faults(200, 5))) for _ in range(3)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert faults == [0] * 3


@pytest.mark.parametrize("threads", [0, -1, 100_000])
def test_impossible_numbers_of_threads_are_refused(threads: int) -> None:
    with pytest.raises(ValueError, match="allowed: 1 to"):
        _native.ThreadPool(threads)
    with pytest.raises(ValueError, match="allowed: 1 to"):
        _native.measure_limits("scalar", threads)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="RLIMIT_NPROC counts threads on Linux")
def test_a_refused_thread_is_an_error() -> None:
    """In a process of its own: its address space is too small for the stacks of so many threads."""
    lines = (
        "import resource",
        "from topg import _native",
        "resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))",
        "_native.ThreadPool(1000)",
    )
    result = subprocess.run([sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True, check=False)
    assert result.returncode == 1
    assert "use fewer threads" in result.stderr


def test_every_processor_runs_the_scalar_kernels() -> None:
    assert _native.built_isas()[0] == "scalar"
    assert "scalar" in _native.usable_isas()


def test_the_best_usable_instruction_set_is_the_default() -> None:
    assert _native.isa_for("") == _native.usable_isas()[-1]


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the names are those of x86-64")
def test_instruction_sets_of_this_build() -> None:
    assert _native.built_isas() == ["scalar", "avx2", "avx512_vnni", "amx"]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc/cpuinfo")
def test_what_is_usable_agrees_with_the_kernel() -> None:
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    flags = next((set(line.split()) for line in lines if line.startswith("flags")), set())
    assert ("avx2" in _native.usable_isas()) == ({"avx2", "fma", "f16c"} <= flags)
    assert ("avx512_vnni" in _native.usable_isas()) == ({"avx512_vnni", "avx512bw", "avx512vl", "avx512dq"} <= flags)


@pytest.mark.parametrize("name", ["sse9", "AVX2", "avx512"])
def test_an_unknown_instruction_set_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=rf"'{name}'.*usable here: scalar"):
        _native.isa_for(name)


@pytest.mark.parametrize("isa", _native.usable_isas())
def test_limits_are_positive(isa: str) -> None:
    limits = _native.measure_limits(isa, 1)
    assert set(limits) == {
        "read_bytes_per_second", "int8_ops_per_second", "bfloat16_ops_per_second", "float32_ops_per_second",
        "barrier_seconds",
    }  # fmt: skip
    assert all(value > 0 for value in limits.values())
    assert limits["read_bytes_per_second"] < 2e12


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_pool_may_be_made_after_a_fork() -> None:
    assert in_a_fork(lambda: _native.ThreadPool(2).count_barrier_faults(5, 5) == 0)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_pool_from_before_a_fork_refuses_to_run_and_can_be_dropped() -> None:
    pools = [_native.ThreadPool(3)]
    pools[0].count_barrier_faults(5, 5)
    time.sleep(0.01)  # its workers sleep by now: what they wait for must not be waited for in turn

    def refused_and_dropped() -> bool:
        try:
            pools[0].count_barrier_faults(1, 1)
        except RuntimeError as error:
            pools.clear()
            return "forked" in str(error)
        return False

    assert in_a_fork(refused_and_dropped)
    assert pools[0].count_barrier_faults(5, 5) == 0


def test_measuring_leaves_how_the_caller_computes_as_it_was() -> None:
    _native.measure_limits("scalar", 1)
    assert np.float32(1e-38) * np.float32(0.5) != 0  # denormals are flushed to zero inside kernels only
