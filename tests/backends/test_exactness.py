"""A row's logits are the same bits alone, in a batch, and however its prompt was cut into steps."""

from __future__ import annotations

import numpy as np
import pytest

from support.memory_model import Dimensions, MemoryModel, kept_model, random_model
from support.stepping import FloatArray, run_chunks, run_mixed, shuffled_tables
from topg.kv.pages import KVType
from topg.precision.recipes import RECIPES

torch = pytest.importorskip("torch")

from topg.backends.torch import TorchBackend  # noqa: E402  # after the check for torch

PAGE = 32
KEPT_TYPES = ("Q4_1", "Q4_K", "Q6_K")  # with minimums, float32 scales, and groups of 16
KV_TYPES: tuple[KVType, ...] = ("float32", "bfloat16")


def _backend(model: MemoryModel, kv_dtype: KVType = "bfloat16", flash: bool = True) -> TorchBackend:
    return TorchBackend(model, page_count=100, tokens_per_page=PAGE, kv_dtype=kv_dtype, flash_attention=flash)


def _sequences(lengths: list[int]) -> list[list[int]]:
    rng = np.random.default_rng(7)
    return [rng.integers(0, 99, length).tolist() for length in lengths]


def assert_same_bits(left: FloatArray, right: FloatArray) -> None:
    np.testing.assert_array_equal(left.view(np.uint32), right.view(np.uint32))


@pytest.mark.parametrize(
    ("stored", "kv_dtype"),
    [
        *((recipe, kv) for recipe in RECIPES for kv in KV_TYPES),
        *((kind, "bfloat16") for kind in KEPT_TYPES),
        ("int8", "int8"),
    ],
)
def test_chunks_and_batches_do_not_change_a_bit(stored: str, kv_dtype: KVType) -> None:
    lengths = [67, 1, 2, 31, 32, 33, 64, 65, 40, 5, 17, 90, 11, 29, 3, 70]
    sequences = _sequences(lengths)
    tables = shuffled_tables(100, lengths, PAGE)
    backend = _backend(kept_model(stored) if stored in KEPT_TYPES else random_model(stored), kv_dtype)
    whole = run_chunks(backend, sequences[0], tables[0], 67)
    assert np.isfinite(whole).all()
    for chunk in (1, 7, 32):
        assert_same_bits(run_chunks(backend, sequences[0], tables[0], chunk), whole)
    mixed = run_mixed(backend, sequences, tables, [7, 1, 1, 5, 32, 4, 64, 13, 8, 2, 17, 30, 1, 6, 3, 70])
    assert_same_bits(mixed[0], whole)
    assert_same_bits(mixed[15], run_chunks(backend, sequences[15], tables[15], 11))


@pytest.mark.parametrize("flash", [True, False])
def test_several_key_blocks(flash: bool) -> None:
    (tokens,) = _sequences([550])
    (pages,) = shuffled_tables(100, [550], PAGE)
    backend = _backend(random_model("int8"), flash=flash)
    whole = run_chunks(backend, tokens, pages, 550)
    assert_same_bits(run_chunks(backend, tokens, pages, 97), whole)
    assert_same_bits(run_chunks(backend, tokens, pages, 260), whole)


@pytest.mark.parametrize("recipe", ["float32", "int8"])
def test_the_number_of_threads_does_not_change_a_bit(recipe: str) -> None:
    (tokens,) = _sequences([40])
    model = random_model(
        recipe, Dimensions(hidden=576, intermediate=1536, heads=9, kv_heads=3, head_dim=64, plain=True)
    )
    before = torch.get_num_threads()
    results = []
    for threads in (1, 2, 3):
        backend = TorchBackend(model, page_count=2, tokens_per_page=PAGE, threads=threads)
        results.append(run_chunks(backend, tokens, [1, 0], 40))
    torch.set_num_threads(before)
    assert_same_bits(results[1], results[0])
    assert_same_bits(results[2], results[0])


def test_old_contents_of_a_page_do_not_matter() -> None:
    first, second = _sequences([70, 37])
    backend = _backend(random_model("bfloat16"))
    fresh = run_chunks(backend, second, [5, 6], 37)
    run_chunks(backend, first, [6, 5, 4], 70)
    assert_same_bits(run_chunks(backend, second, [6, 5], 37), fresh)


def test_flash_and_plain_attention_agree() -> None:
    (tokens,) = _sequences([300])
    (pages,) = shuffled_tables(100, [300], PAGE)
    flash = run_chunks(_backend(random_model("float32"), "float32"), tokens, pages, 300)
    plain = run_chunks(_backend(random_model("float32"), "float32", flash=False), tokens, pages, 300)
    np.testing.assert_allclose(flash, plain, rtol=0, atol=2e-5)
