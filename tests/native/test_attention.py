"""Paged attention on every instruction set of this machine: right, exact however it is cut, and deaf to
stale memory."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import get_args

import numpy as np
import pytest
from numpy.typing import NDArray

from topg import _native
from topg.kv.pages import KVType
from topg.precision.bfloat16 import from_bfloat16, to_bfloat16
from topg.precision.rotation import hadamard

Floats = NDArray[np.float32]
Doubles = NDArray[np.float64]
Bytes = NDArray[np.uint8]

ISAS = pytest.mark.parametrize("isa", _native.usable_isas())
KV_TYPES = pytest.mark.parametrize("kv_dtype", get_args(KVType))

KEY_BLOCK = 256
SCALE_RUN = 64  # keys whose weights are rounded to 8 bits together
TILE = 32
LAYERS, LAYER = 2, 1
LOG2_E = np.float32(1.44269504)
STALE = 0xFF  # a NaN in every type of cache
BFLOAT16_ROUNDING = 2.0**-8  # relative, at most
ROUGH_EXPONENTIAL = 1e-4  # of the weights that are rounded to 8 bits


@dataclass(frozen=True)
class Shape:
    """An attention, its cache and the pages of one sequence."""

    kv_dtype: KVType = "bfloat16"
    head_dim: int = 64
    heads: int = 3
    kv_heads: int = 1
    tokens_per_page: int = 64
    softcap: float = 0.0
    window: int = 0
    seed: int = 0

    @property
    def scale(self) -> float:
        return float(np.float32(1 / math.sqrt(self.head_dim)))

    def kernel(self, isa: str) -> _native.PagedAttention:
        return _native.PagedAttention(
            isa,
            kv_dtype=self.kv_dtype,
            layers=LAYERS,
            heads=self.heads,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            tokens_per_page=self.tokens_per_page,
            scale=self.scale,
            softcap=self.softcap,
            window=self.window,
        )

    def __str__(self) -> str:
        return f"{self.kv_dtype}-{self.head_dim}x{self.heads}/{self.kv_heads}"


@dataclass(frozen=True)
class Tokens:
    """Query, key and value heads of a sequence, each [tokens, heads, head_dim]."""

    query: Floats
    key: Floats
    value: Floats

    @classmethod
    def random(cls, shape: Shape, count: int) -> Tokens:
        rng = np.random.default_rng(shape.seed)
        query = rng.normal(size=(count, shape.heads, shape.head_dim))
        key, value = rng.normal(size=(2, count, shape.kv_heads, shape.head_dim))
        query *= rng.uniform(0.5, 4, size=(count, shape.heads, 1))  # weights from almost even to almost all on one key
        return cls(query.astype(np.float32), key.astype(np.float32), value.astype(np.float32))


class Sequence:
    """A sequence in pages of its own, in a pool whose memory is full of NaN."""

    def __init__(self, isa: str, shape: Shape, tokens: Tokens, *, shuffle: int = 0, stale: int = STALE) -> None:
        self.shape, self.tokens, self.kernel = shape, tokens, shape.kernel(isa)
        count = -(-len(tokens.key) // shape.tokens_per_page)
        rng = np.random.default_rng(shuffle)
        self.pages = rng.permutation(count + 2)[:count].astype(np.int32)
        self.pool = np.full((count + 2) * self.kernel.page_bytes, stale, np.uint8)

    def append(self, start: int, end: int) -> None:
        key, value = self.tokens.key[start:end], self.tokens.value[start:end]
        self.kernel.append(self.pool, LAYER, self.pages, start, key, value)

    def attend(self, start: int, end: int, *, item_tokens: int | None = None, item_blocks: int = 0) -> Floats:
        query = self.tokens.query[start:end]
        items = item_tokens or end - start
        out = self.kernel.attend(self.pool, LAYER, self.pages, start, query, min(items, end - start), item_blocks)
        return out.reshape(query.shape)


def _filled(isa: str, shape: Shape, count: int) -> Sequence:
    sequence = Sequence(isa, shape, Tokens.random(shape, count))
    sequence.append(0, count)
    return sequence


def _same_bits(left: Floats, right: Floats) -> None:
    np.testing.assert_array_equal(left.view(np.int32), right.view(np.int32))


# ---- what the pages hold --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cached:
    """Keys and values [tokens, kv_heads, head_dim] as the cache has them, and the scales of int8 values."""

    key: Doubles
    value: Doubles
    value_scales: Doubles  # [tokens, kv_heads]


def _tiles(sequence: Sequence) -> Iterator[tuple[int, int, Bytes]]:
    """(first token, KV head, bytes) of each tile, where the layout puts it: [layer][kv_head][tile] in a page."""
    shape, pages = sequence.shape, sequence.pool.reshape(-1, sequence.kernel.page_bytes)
    tiles = pages.reshape(len(pages), LAYERS, shape.kv_heads, shape.tokens_per_page // TILE, -1)
    for index, page in enumerate(sequence.pages):
        for head in range(shape.kv_heads):
            for tile in range(shape.tokens_per_page // TILE):
                yield index * shape.tokens_per_page + tile * TILE, head, tiles[page, LAYER, head, tile]


def _unpacked(shape: Shape, tile: Bytes) -> tuple[Doubles, Doubles, Doubles]:
    """Keys and values [32, head_dim] of a tile, and the values' scales [32]."""
    dim, ones = -(-shape.head_dim // 16) * 16, np.ones(TILE)
    if shape.kv_dtype == "float32":
        key, value = tile.view(np.float32).reshape(2, -1)
        keys, values, scales = key.reshape(dim, TILE).T, value.reshape(TILE, dim), ones
    elif shape.kv_dtype == "bfloat16":
        key, value = from_bfloat16(tile.view(np.uint16)).reshape(2, -1)
        keys = key.reshape(dim // 2, TILE, 2).transpose(1, 0, 2).reshape(TILE, dim)
        values, scales = value.reshape(TILE // 2, dim, 2).transpose(0, 2, 1).reshape(TILE, dim), ones
    else:
        codes, all_scales = tile[: -8 * TILE].reshape(2, -1), tile[-8 * TILE :].view(np.float32).astype(np.float64)
        key_codes = codes[0].reshape(dim // 4, TILE, 4).transpose(1, 0, 2).reshape(TILE, dim).astype(np.float64) - 128
        value_codes = codes[1].view(np.int8).reshape(TILE // 4, dim, 4).transpose(0, 2, 1).reshape(TILE, dim)
        scales = all_scales[TILE:]
        keys, values = key_codes * all_scales[:TILE, None], value_codes * scales[:, None]
    return keys[:, : shape.head_dim], values[:, : shape.head_dim], scales


def _cached(sequence: Sequence) -> Cached:
    """With keys, and values, of an int8 cache transformed as they lie there."""
    shape, count = sequence.shape, len(sequence.tokens.key)
    heads = (len(sequence.pages) * shape.tokens_per_page, shape.kv_heads)
    key, value, scales = np.empty((*heads, shape.head_dim)), np.empty((*heads, shape.head_dim)), np.empty(heads)
    with np.errstate(invalid="ignore"):
        for first, head, tile in _tiles(sequence):
            run = slice(first, first + TILE)
            key[run, head], value[run, head], scales[run, head] = _unpacked(shape, tile)
    return Cached(key[:count], value[:count], scales[:count])


def _spread(shape: Shape, heads: Floats) -> Floats:
    """The transform of an int8 cache: over the largest power of two that divides head_dim."""
    return hadamard(heads, shape.head_dim & -shape.head_dim)


def _stored_query(shape: Shape, query: Floats) -> Doubles:
    """Queries as they are multiplied: scaled, and rounded to the cache's type.  Scores are exponents of e."""
    factor = np.float32(shape.scale) * (np.float32(1) if shape.softcap else LOG2_E)
    scaled = query * factor
    if shape.kv_dtype == "bfloat16":
        scaled = from_bfloat16(to_bfloat16(scaled))
    if shape.kv_dtype == "int8":
        scaled = _spread(shape, scaled)
        peaks = np.abs(scaled).max(-1, keepdims=True)
        return np.rint(scaled * (127 / peaks)).astype(np.float64) * peaks / (127 if shape.softcap else 127 * LOG2_E)
    return scaled.astype(np.float64) / (1 if shape.softcap else LOG2_E)


# ---- the definition -------------------------------------------------------------------------------------------------


def _visible(shape: Shape, position: int) -> slice:
    return slice(max(0, position - shape.window + 1) if shape.window else 0, position + 1)


def _reference(sequence: Sequence, start: int, end: int) -> tuple[Doubles, Doubles]:
    """Results of positions start .. end - 1 from what the cache holds, and how far rounding may take them off."""
    shape, cached = sequence.shape, _cached(sequence)
    query = _stored_query(shape, sequence.tokens.query[start:end])
    results, bounds = np.empty_like(query), np.empty_like(query)
    for row, position in enumerate(range(start, end)):
        seen = _visible(shape, position)
        for head in range(shape.heads):
            kv_head = head * shape.kv_heads // shape.heads
            key, value = cached.key[seen, kv_head], cached.value[seen, kv_head]
            scores = key @ query[row, head]
            if shape.softcap:
                scores = shape.softcap * np.tanh(scores / shape.softcap)
            weights = np.exp(scores - scores.max())
            weights /= weights.sum()
            results[row, head] = weights @ value
            bounds[row, head] = _rounding(shape, seen, weights, value, cached.value_scales[seen, kv_head])
    if shape.kv_dtype == "int8":
        results = _spread(shape, results)
        bounds = np.linalg.norm(bounds, axis=-1, keepdims=True) * np.ones(shape.head_dim)  # a transform keeps lengths
    return results, bounds


def _rounding(shape: Shape, seen: slice, weights: Doubles, value: Doubles, value_scales: Doubles) -> Doubles:
    """How far off rounding the weights may take each value, besides float32 arithmetic (1e-5 of the magnitudes)."""
    arithmetic = 1e-5 * (weights @ np.abs(value))
    from_mean = weights @ np.abs(value - weights @ value)  # errors of weights that are in numerator and denominator
    if shape.kv_dtype == "float32":
        return arithmetic
    if shape.kv_dtype == "bfloat16":
        return arithmetic + BFLOAT16_ROUNDING * from_mean
    # Half a step of 1/255 of the largest product of weight and scale among 64 keys, times the codes.
    products = weights * value_scales
    runs = np.arange(seen.start, seen.stop) // SCALE_RUN
    peaks = np.array([products[runs == run].max() for run in np.unique(runs)])[runs - runs[0]]
    return arithmetic + ROUGH_EXPONENTIAL * from_mean + (peaks / 510) @ np.abs(value / value_scales[:, None])


def _check(sequence: Sequence, start: int, end: int) -> None:
    expected, bounds = _reference(sequence, start, end)
    error = np.abs(sequence.attend(start, end) - expected)
    assert (error <= bounds).all(), f"off by {(error / bounds).max():.3f} times what rounding allows"


# ---- right ----------------------------------------------------------------------------------------------------------

SHAPES = [
    Shape(head_dim=16, heads=2, kv_heads=2),
    Shape(head_dim=20, heads=4, kv_heads=2),
    Shape(head_dim=64, heads=9, kv_heads=3),
    Shape(head_dim=80, heads=4, kv_heads=1, tokens_per_page=96),
    Shape(head_dim=128, heads=7, kv_heads=1, tokens_per_page=32),
    Shape(head_dim=256, heads=8, kv_heads=1),
]


@ISAS
@KV_TYPES
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: f"{shape.head_dim}x{shape.heads}/{shape.kv_heads}")
def test_results_agree_with_float64(isa: str, kv_dtype: KVType, shape: Shape) -> None:
    sequence = _filled(isa, replace(shape, kv_dtype=kv_dtype), 600)
    for start, end in ((0, 3), (30, 34), (254, 258), (597, 600)):
        _check(sequence, start, end)


@ISAS
@KV_TYPES
@pytest.mark.parametrize("head_dim", [1, 2, 24, 96, 512])
def test_heads_of_any_size(isa: str, kv_dtype: KVType, head_dim: int) -> None:
    sequence = _filled(isa, Shape(kv_dtype, head_dim, heads=2, kv_heads=1), 40)
    _check(sequence, 36, 40)


@ISAS
@KV_TYPES
@pytest.mark.parametrize("count", [1, 2, 3, 31, 32, 33, 63, 64, 65, 255, 256, 257, 513])
def test_contexts_of_any_length(isa: str, kv_dtype: KVType, count: int) -> None:
    _check(_filled(isa, Shape(kv_dtype), count), count - 1, count)


@ISAS
@KV_TYPES
@pytest.mark.parametrize("window", [1, 31, 64, 250, 256, 300])
def test_windows_across_pages_and_blocks(isa: str, kv_dtype: KVType, window: int) -> None:
    sequence = _filled(isa, Shape(kv_dtype, window=window), 600)
    for start, end in ((0, 2), (29, 35), (254, 259), (290, 320), (510, 514), (599, 600)):
        _check(sequence, start, end)


@ISAS
@KV_TYPES
def test_soft_caps(isa: str, kv_dtype: KVType) -> None:
    sequence = _filled(isa, Shape(kv_dtype, softcap=1.5), 300)
    for start, end in ((0, 2), (254, 258), (298, 300)):
        _check(sequence, start, end)


@ISAS
@KV_TYPES
@pytest.mark.parametrize("head_dim", [20, 64])
def test_the_cache_holds_what_was_appended(isa: str, kv_dtype: KVType, head_dim: int) -> None:
    sequence = _filled(isa, Shape(kv_dtype, head_dim, heads=2, kv_heads=2), 70)
    cached, tokens = _cached(sequence), sequence.tokens
    rounding = {"float32": 0.0, "bfloat16": BFLOAT16_ROUNDING, "int8": 0.501 / 127}[kv_dtype]
    for held, given in ((cached.key, tokens.key), (cached.value, tokens.value)):
        expected = _spread(sequence.shape, given) if kv_dtype == "int8" else given
        of = np.abs(expected).max(-1, keepdims=True) if kv_dtype == "int8" else np.abs(expected)
        assert (np.abs(held - expected) <= rounding * of).all()


@ISAS
@KV_TYPES
def test_scores_far_apart_and_far_from_zero(isa: str, kv_dtype: KVType) -> None:
    shape = Shape(kv_dtype)
    tokens = Tokens.random(shape, 300)
    tokens.query[...] *= 1000
    sequence = Sequence(isa, shape, tokens)
    sequence.append(0, 300)
    results = sequence.attend(0, 300)
    assert np.isfinite(results).all()
    assert np.abs(results).max() <= 1.01 * np.abs(tokens.value).max() * (8 if kv_dtype == "int8" else 1)


# ---- the same bits however it is cut ---------------------------------------------------------------------------------

CUT_SHAPES = [
    Shape(),
    Shape(head_dim=20, heads=8, kv_heads=2, window=100, tokens_per_page=32),
    Shape(head_dim=80, heads=1, kv_heads=1, softcap=3.0),
    Shape(head_dim=128, heads=14, kv_heads=2),
]
CUTS = pytest.mark.parametrize(
    "shape", CUT_SHAPES, ids=lambda shape: f"{shape.head_dim}x{shape.heads}/{shape.kv_heads}"
)
COUNT = 530


@ISAS
@KV_TYPES
@CUTS
def test_steps_of_any_size_give_the_same_bits(isa: str, kv_dtype: KVType, shape: Shape) -> None:
    shape = replace(shape, kv_dtype=kv_dtype)
    whole = _filled(isa, shape, COUNT).attend(0, COUNT)
    pieces = Sequence(isa, shape, Tokens.random(shape, COUNT), shuffle=1, stale=0)
    rng, start = np.random.default_rng(2), 0
    while start < COUNT:
        end = min(COUNT, start + int(rng.choice([1, 2, 3, 5, 16, 33, 100])))
        pieces.append(start, end)
        _same_bits(pieces.attend(start, end), whole[start:end])
        start = end


@ISAS
@KV_TYPES
@CUTS
@pytest.mark.parametrize(("item_tokens", "item_blocks"), [(1, 0), (7, 0), (17, 1), (1, 2), (COUNT, 1), (COUNT, 3)])
def test_items_of_any_size_give_the_same_bits(
    isa: str, kv_dtype: KVType, shape: Shape, item_tokens: int, item_blocks: int
) -> None:
    sequence = _filled(isa, replace(shape, kv_dtype=kv_dtype), COUNT)
    start = COUNT - 60
    whole = sequence.attend(start, COUNT)
    _same_bits(sequence.attend(start, COUNT, item_tokens=item_tokens, item_blocks=item_blocks), whole)


@ISAS
@KV_TYPES
@pytest.mark.parametrize("tokens_per_page", [32, 96, 512])
def test_pages_of_any_size_give_the_same_bits(isa: str, kv_dtype: KVType, tokens_per_page: int) -> None:
    shape = Shape(kv_dtype)
    expected = _filled(isa, shape, 300).attend(280, 300)
    _same_bits(_filled(isa, replace(shape, tokens_per_page=tokens_per_page), 300).attend(280, 300), expected)


@pytest.mark.skipif("amx" not in _native.usable_isas(), reason="this processor has no AMX")
@CUTS
def test_tiles_and_vectors_give_the_same_bits_of_int8(shape: Shape) -> None:
    shape = replace(shape, kv_dtype="int8")
    vectors, tiles = (_filled(isa, shape, COUNT).attend(COUNT - 60, COUNT) for isa in ("avx512_vnni", "amx"))
    _same_bits(tiles, vectors)


# ---- numbers that are none -------------------------------------------------------------------------------------------


@ISAS
@KV_TYPES
@pytest.mark.parametrize("what", ["query", "key", "value"])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_no_number_reaches_those_who_see_it_and_nobody_else(
    isa: str, kv_dtype: KVType, what: str, bad: float
) -> None:
    shape, count, at = Shape(kv_dtype, window=40), 90, 34
    clean = _filled(isa, shape, count).attend(0, count)
    tokens = Tokens.random(shape, count)
    getattr(tokens, what)[at, 0, 5] = bad
    sequence = Sequence(isa, shape, tokens)
    sequence.append(0, count)
    results = sequence.attend(0, count)
    struck = [at] if what == "query" else range(at, at + shape.window)
    unstruck = [row for row in range(count) if row not in struck]
    _same_bits(results[unstruck], clean[unstruck])
    heads = [0] if what == "query" else range(shape.heads)
    if what == "key" and math.isinf(bad) and kv_dtype != "int8":
        return  # a score of -inf is a weight of 0
    assert not np.isfinite(results[struck][:, heads]).all(-1).any()


@ISAS
@KV_TYPES
def test_pages_behind_the_window_are_not_read(isa: str, kv_dtype: KVType) -> None:
    sequence = _filled(isa, Shape(kv_dtype, window=70), 600)
    expected = sequence.attend(597, 600)
    pages = sequence.pool.reshape(-1, sequence.kernel.page_bytes)
    pages[sequence.pages[: (597 - 69) // 64]] = STALE
    _same_bits(sequence.attend(597, 600), expected)


# ---- closed to nonsense ----------------------------------------------------------------------------------------------


def _good() -> tuple[_native.PagedAttention, Bytes, NDArray[np.int32], Floats]:
    shape = Shape()
    kernel = shape.kernel("")
    return (
        kernel,
        np.zeros(2 * kernel.page_bytes, np.uint8),
        np.array([1, 0], np.int32),
        np.zeros((2, 3, 64), np.float32),
    )


def test_indices_outside_their_arrays_are_refused() -> None:
    kernel, pool, pages, query = _good()
    assert kernel.attend(pool, 0, pages, 126, query, 2, 0).shape == (2, 192)
    with pytest.raises(ValueError, match="2 pages; 3 are needed"):
        kernel.attend(pool, 0, pages, 127, query, 2, 0)
    for page in (-1, 2):
        with pytest.raises(ValueError, match=f"a page is {page}; allowed: 0 to 1"):
            kernel.attend(pool, 0, np.array([page], np.int32), 0, query, 2, 0)
    with pytest.raises(ValueError, match="layer is 2"):
        kernel.attend(pool, 2, pages, 0, query, 2, 0)
    with pytest.raises(ValueError, match="start is -1"):
        kernel.attend(pool, 0, pages, -1, query, 2, 0)
    with pytest.raises(ValueError, match="item_tokens is 3"):
        kernel.attend(pool, 0, pages, 0, query, 3, 0)
    with pytest.raises(ValueError, match=r"must be \[tokens, 3, 64\]"):
        kernel.attend(pool, 0, pages, 0, query[:, :2].copy(), 2, 0)
    with pytest.raises(ValueError, match=r"must be \[tokens, 1, 64\]"):
        kernel.append(pool, 0, pages, 0, query, query)


def test_pools_that_are_not_aligned_are_refused() -> None:
    kernel, pool, pages, query = _good()
    with pytest.raises(ValueError, match="aligned to 4 bytes"):
        kernel.attend(np.zeros(len(pool) + 1, np.uint8)[1:], 0, pages, 0, query, 2, 0)


@pytest.mark.skipif("ASAN_OPTIONS" in os.environ, reason="sanitizers end the process where memory lacks")
def test_a_lack_of_memory_is_an_error_of_python() -> None:
    shape = replace(Shape(), kv_dtype="int8", head_dim=512, heads=64, tokens_per_page=1 << 16)
    kernel, start = shape.kernel(""), (1 << 30) - 1
    # Blocks enough for states of half a petabyte, all in one page.
    pages, pool = np.zeros(1 << 14, np.int32), np.zeros(kernel.page_bytes, np.uint8)
    with pytest.raises(MemoryError):
        kernel.attend(pool, 0, pages, start, np.zeros((1, 64, 512), np.float32), 1, 1)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"heads": 4, "kv_heads": 3}, "4 heads cannot share 3 KV heads"),
        ({"head_dim": 513}, "head_dim is 513; allowed: 1 to 512"),
        ({"tokens_per_page": 40}, "multiple of 32"),
        ({"softcap": -1.0}, "softcap"),
        ({"window": -1}, "window is -1"),
        ({"kv_dtype": "int4"}, "int4"),
    ],
)
def test_shapes_that_make_no_sense_are_refused(wrong: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(Shape(), **wrong).kernel("")  # type: ignore[arg-type]
