"""Sizing the KV cache: full batches of full contexts, within the memory there is."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from support.checkpoints import llama_config, write_huggingface
from support.memory_model import MemoryModel
from topg import kv_budget
from topg.backends import BackendType, backend_type
from topg.backends.native.assemble import EngineLimits, assemble
from topg.backends.native.compiler import compile_plan
from topg.config import Config, ExecutionConfig, MemoryConfig
from topg.converter.convert import ModelConverter
from topg.converter.format import read_manifest
from topg.converter.manifest import Manifest
from topg.errors import BackendError, CapacityError, UnsupportedModelError
from topg.kv.pages import KVGeometry
from topg.kv_budget import available_memory, plan_kv
from topg.plan import PlanBuilder
from topg.precision.formats import BFLOAT16, FLOAT16, FLOAT32, INT4, INT8_ROTATED, INT8_WEIGHT_ONLY, Precision

PRECISIONS = [
    FLOAT32, FLOAT16, BFLOAT16, INT8_WEIGHT_ONLY, INT8_ROTATED, INT4,
    Precision("int4", "int8", group_size=32, activation_group=32, minimum=True, scale="float16"),
    Precision("int8", "int8", group_size=16, activation_group=32, scale="float32"),
    Precision("int8", "int8", group_size=64, activation_group=32, scale="float32"),
]  # fmt: skip
BYTES_PER_TOKEN = 2 * 2 * 2 * 16 * 2  # layers, keys and values, heads, values of a head, bytes


@pytest.fixture(scope="module")
def manifest(tmp_path_factory: pytest.TempPathFactory) -> Manifest:
    folder = tmp_path_factory.mktemp("models")
    return read_manifest(ModelConverter(write_huggingface(folder / "tiny"), folder / "out").convert())


def resident_bytes(manifest: Manifest, backend: BackendType) -> int:
    return sum(backend.resident_bytes(record.precision, record.shape) for record in manifest.tensors.values())


def settings(batch: int = 4, page_size: int | None = None) -> Config:
    return Config(execution=ExecutionConfig(max_batch_size=batch), memory=MemoryConfig(page_size=page_size))


def test_a_full_batch_of_full_contexts(manifest: Manifest) -> None:
    budget = plan_kv(manifest, settings(), 200)
    assert budget.geometry.bytes_per_token == BYTES_PER_TOKEN
    assert budget.geometry.tokens_per_page == 64 and budget.page_count == 4 * 4
    assert plan_kv(manifest, settings(page_size=40 * BYTES_PER_TOKEN), 200).geometry.tokens_per_page == 32


@pytest.mark.parametrize(("context", "tokens"), [(1, 32), (33, 64), (200, 224)])
def test_a_page_holds_no_more_than_a_context(manifest: Manifest, context: int, tokens: int) -> None:
    budget = plan_kv(manifest, settings(page_size=10**9), context)
    assert budget.geometry.tokens_per_page == tokens and budget.page_count == 4


@pytest.mark.parametrize("device", ["cpu", "cpu:0"], ids=["native", "torch"])
def test_little_memory_gives_fewer_pages_but_one_context_at_least(
    manifest: Manifest, monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    page = 64 * BYTES_PER_TOKEN

    def free_for(pages: float) -> None:
        memory = resident_bytes(manifest, backend_type("auto", device)) + int(pages * page / 0.8) + 1
        monkeypatch.setattr(kv_budget, "available_memory", lambda: memory)

    free_for(6)
    assert plan_kv(manifest, settings(), 200, device).page_count == 6
    free_for(4)
    assert plan_kv(manifest, settings(), 200, device).page_count == 4
    free_for(3.9)
    with pytest.raises(CapacityError, match="max_context"):
        plan_kv(manifest, settings(), 200, device)


def test_a_page_counts_with_what_it_is_filled_up_by(tmp_path: Path) -> None:
    """Heads of 12 values take the room of 16 on the native back end, and int8 has scales beside its codes."""
    source = write_huggingface(tmp_path / "narrow", config=llama_config(head_dim=12))
    narrow = read_manifest(ModelConverter(source, tmp_path / "out").convert())
    execution = ExecutionConfig(max_batch_size=1, kv_cache_dtype="int8")
    geometry = plan_kv(narrow, Config(execution=execution), 64).geometry
    heads = 64 * 2 * 2 * 2  # tokens, layers, keys and values, heads
    assert backend_type("native").page_bytes(geometry) == heads * (16 + 4)
    assert backend_type("torch").page_bytes(geometry) == heads * (12 + 4)


def test_a_device_that_does_not_exist_is_refused(manifest: Manifest) -> None:
    with pytest.raises(BackendError, match="abacus"):
        plan_kv(manifest, settings(), 200, "abacus")


def test_a_gpu_is_asked_for_its_own_memory(manifest: Manifest, monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("no GPU")
    monkeypatch.setattr(kv_budget, "available_memory", lambda: 0)
    assert plan_kv(manifest, settings(), 200, "cuda").page_count == 4 * 4


def test_a_plan_without_attention_is_refused(manifest: Manifest) -> None:
    build = PlanBuilder()
    build.logits(build.embed("e", 7, 8), "head", 7)
    plan = build.build()
    with pytest.raises(UnsupportedModelError, match="no attention"):
        plan_kv(replace(manifest, plan=plan), settings(), 200)


@pytest.mark.parametrize("precision", PRECISIONS, ids=Precision.describe)
def test_weights_are_counted_as_torch_keeps_them(precision: Precision) -> None:
    torch = pytest.importorskip("torch")
    from topg.backends.torch.weights import load_weights

    model = _model_of(precision)
    loaded = load_weights(model, torch.device("cpu"))
    for name, weight in loaded.items():
        kept = sum(value.nbytes for value in vars(weight).values() if isinstance(value, torch.Tensor))
        assert backend_type("torch").resident_bytes(precision, model.shape(name)) == kept


@pytest.mark.parametrize("precision", PRECISIONS[:-1], ids=Precision.describe)
def test_weights_are_counted_as_the_native_back_end_keeps_them(precision: Precision) -> None:
    model, native = _model_of(precision), backend_type("native")
    program = compile_plan(model.plan, model.precision)
    kv = KVGeometry(1, 1, 4, "float32", 32)
    engine = assemble(program, model, kv, 1, EngineLimits("", 1, 8, 32)).engine
    counted = sum(native.resident_bytes(precision, model.shape(name)) for name in model.plan.tensor_names)
    assert engine.weight_bytes == counted


def _model_of(precision: Precision) -> MemoryModel:
    build = PlanBuilder()
    x = build.select_rows(build.embed("e", 7, 100))
    build.logits(build.linear(x, "w", 12, out="y"), "head", 9)
    plan = build.build()
    rng = np.random.default_rng(0)
    shapes = {name: shape for op in plan.ops for name, shape in op.tensor_shapes().items()}
    tensors = {name: rng.standard_normal(shape, np.float32) for name, shape in shapes.items()}
    return MemoryModel(plan, tensors, dict.fromkeys(tensors, precision))


def test_a_container_limit_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_budget, "CGROUP", tmp_path)
    unlimited = available_memory()
    (tmp_path / "memory.max").write_text("5000\n")
    (tmp_path / "memory.current").write_text("4000\n")
    (tmp_path / "memory.stat").write_text("anon 100\ninactive_file 300\nactive_file 50\n")
    assert available_memory() == 1350
    (tmp_path / "memory.max").write_text("max\n")
    assert unlimited is None or available_memory() is not None
