"""Sizing the KV cache: full batches of full contexts, within the memory there is."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.checkpoints import write_huggingface
from topg import kv_budget
from topg.config import Config, ExecutionConfig, MemoryConfig
from topg.converter.convert import ModelConverter
from topg.converter.format import read_manifest
from topg.converter.manifest import Manifest
from topg.errors import CapacityError
from topg.kv_budget import available_memory, plan_kv

BYTES_PER_TOKEN = 2 * 2 * 2 * 16 * 2  # layers, keys and values, heads, values of a head, bytes


@pytest.fixture(scope="module")
def manifest(tmp_path_factory: pytest.TempPathFactory) -> Manifest:
    folder = tmp_path_factory.mktemp("models")
    return read_manifest(ModelConverter(write_huggingface(folder / "tiny"), folder / "out").convert())


def settings(batch: int = 4, page_size: int | None = None) -> Config:
    return Config(execution=ExecutionConfig(max_batch_size=batch), memory=MemoryConfig(page_size=page_size))


def test_a_full_batch_of_full_contexts(manifest: Manifest) -> None:
    budget = plan_kv(manifest, settings(), 200)
    assert budget.geometry.bytes_per_token == BYTES_PER_TOKEN
    assert budget.geometry.tokens_per_page == 64 and budget.page_count == 4 * 4
    assert plan_kv(manifest, settings(page_size=40 * BYTES_PER_TOKEN), 200).geometry.tokens_per_page == 32


def test_little_memory_gives_fewer_pages_but_one_context_at_least(
    manifest: Manifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = 64 * BYTES_PER_TOKEN

    def free_for(pages: float) -> None:
        monkeypatch.setattr(kv_budget, "available_memory", lambda: manifest.nbytes + int(pages * page / 0.8) + 1)

    free_for(6)
    assert plan_kv(manifest, settings(), 200).page_count == 6
    free_for(4)
    assert plan_kv(manifest, settings(), 200).page_count == 4
    free_for(3.9)
    with pytest.raises(CapacityError, match="max_context"):
        plan_kv(manifest, settings(), 200)


def test_a_container_limit_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_budget, "CGROUP", tmp_path)
    unlimited = available_memory()
    (tmp_path / "memory.max").write_text("5000\n")
    (tmp_path / "memory.current").write_text("4000\n")
    (tmp_path / "memory.stat").write_text("anon 100\ninactive_file 300\nactive_file 50\n")
    assert available_memory() == 1350
    (tmp_path / "memory.max").write_text("max\n")
    assert unlimited is None or available_memory() is not None
