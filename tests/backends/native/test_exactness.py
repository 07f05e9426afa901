"""A row's logits are the same bits alone, in a batch, however its prompt was cut, and with any number of threads."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.memory_model import Dimensions, MemoryModel, kept_model, random_model
from support.stepping import FloatArray, run_chunks, run_mixed, shuffled_tables
from topg import _native
from topg.backends import SequenceSlice, Step
from topg.backends.native import NativeBackend
from topg.kv.pages import KVType
from topg.precision.recipes import RECIPES

PAGE = 32
PAGE_COUNT = 100
SIZE = Dimensions(head_dim=32, hidden=128)
KEPT_TYPES = ("Q4_1", "Q6_K")
THREADS = (1, 2, 4)
# More than a key block of 256, so that blocks are folded; fewer and more rows than split rows among threads.
LONG = [int(token) for token in np.random.default_rng(3).integers(0, 99, 330)]


@cache
def model(stored: str) -> MemoryModel:
    return kept_model(stored) if stored in KEPT_TYPES else random_model(stored, SIZE)


@cache
def backend(stored: str, kv_dtype: KVType, isa: str, threads: int) -> NativeBackend:
    return NativeBackend(
        model(stored), page_count=PAGE_COUNT, tokens_per_page=PAGE, kv_dtype=kv_dtype, isa=isa, threads=threads
    )


@cache
def alone(stored: str, kv_dtype: KVType, isa: str, tokens: tuple[int, ...]) -> FloatArray:
    """Logits of a sequence by itself, in one step, on one thread, on pages in order."""
    return run_chunks(backend(stored, kv_dtype, isa, 1), tokens, range(-(-len(tokens) // PAGE)), len(tokens))


def assert_same_bits(left: FloatArray, right: FloatArray) -> None:
    np.testing.assert_array_equal(left.view(np.uint32), right.view(np.uint32))


@pytest.mark.parametrize("isa", _native.usable_isas())
@pytest.mark.parametrize("kv_dtype", ["float32", "bfloat16", "int8"])
@settings(max_examples=8, deadline=None)
@given(data=st.data())
def test_batches_chunks_and_threads_change_no_bit(kv_dtype: KVType, isa: str, data: st.DataObject) -> None:
    stored = data.draw(st.sampled_from(("int8", "bfloat16", "int4")), "stored")
    threads = data.draw(st.sampled_from(THREADS), "threads")
    lengths = data.draw(st.lists(st.integers(1, 70), min_size=1, max_size=8), "lengths")
    if data.draw(st.booleans(), "long"):
        lengths[0] = len(LONG)
    sequences = [tuple(LONG[length % 7 :][:length]) or tuple(LONG[:1]) for length in lengths]
    chunks = [data.draw(st.integers(1, len(tokens)), "chunk") for tokens in sequences]
    tables = shuffled_tables(PAGE_COUNT, [len(tokens) for tokens in sequences], PAGE, seed=sum(lengths))
    mixed = run_mixed(backend(stored, kv_dtype, isa, threads), sequences, tables, chunks)
    for tokens, logits in zip(sequences, mixed, strict=True):
        assert_same_bits(logits, alone(stored, kv_dtype, isa, tokens))


@pytest.mark.parametrize("stored", [*RECIPES, *KEPT_TYPES])
def test_every_format_is_exact(stored: str) -> None:
    isa, tokens = _native.usable_isas()[-1], tuple(LONG[:67])
    for threads, chunk in ((1, 1), (2, 7), (2, 66)):
        chunked = run_chunks(backend(stored, "bfloat16", isa, threads), tokens, [5, 2, 7], chunk)
        assert_same_bits(chunked, alone(stored, "bfloat16", isa, tokens))


@pytest.mark.parametrize("kv_dtype", ["bfloat16", "int8"])
@pytest.mark.parametrize("chunk", [1, 3, 64, 100])
def test_a_long_sequence_is_exact_in_any_chunks(kv_dtype: KVType, chunk: int) -> None:
    """One row a step splits the keys among threads, a few rows keep their own copies, many split the rows."""
    isa, table = _native.usable_isas()[-1], list(range(20, 20 + 11))
    chunked = run_chunks(backend("int8", kv_dtype, isa, 2), LONG, table, chunk)
    assert_same_bits(chunked, alone("int8", kv_dtype, isa, tuple(LONG)))


def test_a_step_beyond_the_engines_rows_is_cut() -> None:
    """More tokens in one step than the engine takes at once: several sequences, one of them cut in the middle."""
    isa, lengths = _native.usable_isas()[-1], [300, 330, 20, 1]
    sequences = [tuple(LONG[:length]) for length in lengths]
    tables = shuffled_tables(PAGE_COUNT, lengths, PAGE)
    wanted = ("all", "last", "none", "last")
    slices = (SequenceSlice(*part) for part in zip(sequences, [0] * 4, tables, wanted, strict=True))
    logits = backend("int8", "bfloat16", isa, 2).run(Step(tuple(slices)))
    rows = [alone("int8", "bfloat16", isa, tokens) for tokens in sequences]
    assert_same_bits(logits, np.concatenate((rows[0], rows[1][-1:], rows[3][-1:])))


@pytest.mark.parametrize("kv_dtype", ["bfloat16", "int8"])
def test_a_prefix_read_from_pages_is_one_computed_now(kv_dtype: KVType) -> None:
    isa, tokens = _native.usable_isas()[-1], LONG[:80]
    engine = backend("int8", kv_dtype, isa, 2)
    run_chunks(engine, tokens[:64], [40, 41], 64)
    engine.copy_page(41, 51)
    shared = (SequenceSlice(tokens[64:], 64, [40, 41, 42], "all"), SequenceSlice(tokens[64:], 64, [40, 51, 43], "all"))
    computed = alone("int8", kv_dtype, isa, tuple(tokens))[64:]
    assert_same_bits(engine.run(Step(shared)), np.concatenate((computed, computed)))


def test_instruction_sets_with_the_same_arithmetic_give_the_same_bits() -> None:
    """Whole numbers are exact everywhere, so the int8 linears of AMX are those of VNNI."""
    if not {"amx", "avx512_vnni"} <= set(_native.usable_isas()):
        pytest.skip("this processor has no AMX")
    tokens = tuple(LONG[:67])
    assert_same_bits(*(alone("int8", "float32", isa, tokens) for isa in ("amx", "avx512_vnni")))
