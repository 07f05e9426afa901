"""How many threads a machine gets, and why."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from topg.backends.native import machine
from topg.backends.native.machine import Machine


def test_this_machine() -> None:
    found = Machine.detect()
    assert 1 <= found.cores <= found.logical_cpus
    assert found.default_threads >= 1
    if hasattr(os, "sched_getaffinity"):
        assert found.logical_cpus == len(os.sched_getaffinity(0))


@pytest.mark.parametrize(
    ("cores", "quota", "threads"), [(4, None, 4), (4, 2.0, 2), (4, 2.5, 2), (4, 0.5, 1), (2, 8.0, 2)]
)
def test_threads_stay_within_cores_and_quota(cores: int, quota: float | None, threads: int) -> None:
    assert Machine("", 2 * cores, cores, quota, 1).default_threads == threads


def test_the_reason_names_what_limits() -> None:
    assert "container" in Machine("", 8, 4, 1.5, 1).reason
    assert "4 physical cores of 8" in Machine("", 8, 4, None, 1).reason


def test_hyper_threads_of_a_core_count_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for cpu, core in enumerate((0, 0, 1, 1)):
        topology = tmp_path / "cpu" / f"cpu{cpu}" / "topology"
        topology.mkdir(parents=True)
        (topology / "physical_package_id").write_text("0\n")
        (topology / "core_id").write_text(f"{core}\n")
    monkeypatch.setattr(machine, "SYSTEM", tmp_path)
    monkeypatch.setattr(machine, "_affinity", lambda: frozenset({0, 1, 2, 3, 9}))
    found = Machine.detect()
    assert (found.logical_cpus, found.cores) == (5, 3)


def test_sizes_of_data_caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    caches = [("1", "Instruction", "64K"), ("1", "Data", "48K"), ("2", "Unified", "2048K"), ("3", "Unified", "300M")]
    for index, (level, kind, size) in enumerate(caches):
        cache = tmp_path / "cpu" / "cpu3" / "cache" / f"index{index}"
        cache.mkdir(parents=True)
        (cache / "level").write_text(f"{level}\n")
        (cache / "type").write_text(f"{kind}\n")
        (cache / "size").write_text(f"{size}\n")
    monkeypatch.setattr(machine, "SYSTEM", tmp_path)
    monkeypatch.setattr(machine, "_affinity", lambda: frozenset({3}))
    assert Machine.detect().cache_bytes == {1: 48 << 10, 2: 2 << 20, 3: 300 << 20}


@pytest.mark.parametrize(
    ("files", "quota"),
    [
        ({"cpu.max": "150000 100000"}, 1.5),
        ({"cpu.max": "max 100000"}, None),
        ({"cpu/cpu.cfs_quota_us": "200000", "cpu/cpu.cfs_period_us": "100000"}, 2.0),
        ({"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, None),
        ({"cpu,cpuacct/cpu.cfs_quota_us": "300000", "cpu,cpuacct/cpu.cfs_period_us": "100000"}, 3.0),
        ({"cpu.max": "400000 100000", "user/service/cpu.max": "max 100000", "user/cpu.max": "200000 100000"}, 2.0),
        ({"elsewhere/cpu.max": "100000 100000"}, None),
        ({}, None),
    ],
)
def test_quotas_of_both_versions(
    files: dict[str, str], quota: float | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    membership = tmp_path / "membership"
    membership.write_text("0::/user/service\n1:memory:/elsewhere\n")
    monkeypatch.setattr(machine, "CGROUP", tmp_path)
    monkeypatch.setattr(machine, "MEMBERSHIP", membership)
    assert Machine.detect().quota == quota
