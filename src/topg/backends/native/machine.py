"""The processor this process may use, and how many threads make sense on it."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

SYSTEM = Path("/sys/devices/system")
CPU_INFO = Path("/proc/cpuinfo")
CGROUP = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class Machine:
    """What limits the number of threads.

    logical_cpus   processors this process may run on (its affinity)
    cores          physical cores among them: hyper-threads of one core share its multipliers
    quota          processors' worth of time a container may take, None without such a limit
    numa_nodes     memory nodes of the machine
    """

    model: str
    logical_cpus: int
    cores: int
    quota: float | None
    numa_nodes: int

    @classmethod
    def detect(cls) -> Machine:
        """This machine, as this process sees it."""
        cpus = _affinity()
        return cls(_model_name(), len(cpus), _count_cores(cpus), _quota(), _count_nodes())

    @property
    def default_threads(self) -> int:
        """One thread a physical core, as far as the container's quota allows, and at least one."""
        if self.quota is None:
            return self.cores
        return max(1, min(self.cores, int(self.quota)))

    @property
    def reason(self) -> str:
        """Why `default_threads` is what it is, as a sentence."""
        cores = f"{self.cores} physical core{'s' if self.cores != 1 else ''} of {self.logical_cpus} usable processors"
        if self.quota is not None and int(self.quota) < self.cores:
            return f"the container may use {self.quota:g} processors' worth of time, of {cores}"
        return f"one thread for each of {cores}"


def _affinity() -> frozenset[int]:
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))


def _count_cores(cpus: Iterable[int]) -> int:
    """Distinct cores; a processor whose core the system does not tell counts as one."""
    return len({_core_of(cpu) for cpu in cpus})


def _core_of(cpu: int) -> tuple[str, str]:
    topology = SYSTEM / "cpu" / f"cpu{cpu}" / "topology"
    package, core = _read(topology / "physical_package_id"), _read(topology / "core_id")
    return (package, core) if package and core else ("", str(cpu))


def _quota() -> float | None:
    """Processors' worth of time: cgroup version 2, then version 1."""
    limit = _read(CGROUP / "cpu.max").split()
    if len(limit) == 2:
        return None if limit[0] == "max" else int(limit[0]) / int(limit[1])
    quota, period = _read(CGROUP / "cpu" / "cpu.cfs_quota_us"), _read(CGROUP / "cpu" / "cpu.cfs_period_us")
    return int(quota) / int(period) if quota and period and int(quota) > 0 else None


def _count_nodes() -> int:
    return max(1, len(list((SYSTEM / "node").glob("node[0-9]*"))))


def _model_name() -> str:
    names = (line.partition(":")[2].strip() for line in _read(CPU_INFO).splitlines() if line.startswith("model name"))
    return next(names, "unknown")


def _read(file: Path) -> str:
    """A file of the system, stripped; empty where there is none."""
    try:
        return file.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""
