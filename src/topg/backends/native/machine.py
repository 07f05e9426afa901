"""The processor this process may use, and how many threads make sense on it."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

SYSTEM = Path("/sys/devices/system")
CPU_INFO = Path("/proc/cpuinfo")
CGROUP = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")


@dataclass(frozen=True)
class Machine:
    """What limits the number of threads.

    logical_cpus   processors this process may run on (its affinity)
    cores          physical cores among them: hyper-threads of one core share its multipliers
    quota          processors' worth of time a container may take, None without such a limit
    numa_nodes     memory nodes of the machine
    cache_bytes    sizes of the data caches that the first of these processors reads through: level -> bytes
    """

    model: str
    logical_cpus: int
    cores: int
    quota: float | None
    numa_nodes: int
    cache_bytes: dict[int, int] = field(default_factory=dict)

    @classmethod
    def detect(cls) -> Machine:
        """This machine, as this process sees it."""
        cpus = _affinity()
        return cls(_model_name(), len(cpus), _count_cores(cpus), _quota(), _count_nodes(), _cache_bytes(min(cpus)))

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
    """Processors' worth of time: the tightest limit of this process's control group and those around it."""
    limits = [limit for folder in _control_groups() if (limit := _quota_of(folder)) is not None]
    return min(limits, default=None)


def _control_groups() -> set[Path]:
    """Folders of this process's control group and those around it; version 1 mounts the limits of time in one below."""
    roots = {"": CGROUP, "cpu": CGROUP / "cpu", "cpu,cpuacct": CGROUP / "cpu,cpuacct"}
    folders = set(roots.values())
    for line in _read(MEMBERSHIP).splitlines():
        _, controllers, group = line.split(":", 2)
        if controllers not in roots:
            continue
        folder = roots[controllers] / group.lstrip("/")
        folders |= {folder, *(parent for parent in folder.parents if parent.is_relative_to(CGROUP))}
    return folders


def _quota_of(folder: Path) -> float | None:
    limit = _read(folder / "cpu.max").split() or [
        _read(folder / "cpu.cfs_quota_us"),
        _read(folder / "cpu.cfs_period_us"),
    ]
    if len(limit) != 2 or not all(part.isdecimal() for part in limit):  # "max" and "-1" stand for no limit
        return None
    return int(limit[0]) / int(limit[1])


def _count_nodes() -> int:
    return max(1, len(list((SYSTEM / "node").glob("node[0-9]*"))))


def _cache_bytes(cpu: int) -> dict[int, int]:
    sizes = {}
    for index in sorted((SYSTEM / "cpu" / f"cpu{cpu}" / "cache").glob("index[0-9]*")):
        level, size = _read(index / "level"), _read(index / "size")
        if _read(index / "type") != "Instruction" and level.isdecimal() and size[:-1].isdecimal() and size[-1] in "KM":
            sizes[int(level)] = int(size[:-1]) << (10 if size[-1] == "K" else 20)
    return sizes


def _model_name() -> str:
    names = (line.partition(":")[2].strip() for line in _read(CPU_INFO).splitlines() if line.startswith("model name"))
    return next(names, "unknown")


def _read(file: Path) -> str:
    """A file of the system, stripped; empty where there is none."""
    try:
        return file.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""
