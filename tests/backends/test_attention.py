"""Attention over pages against its definition in float64."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

from topg.kv.pages import KVGeometry
from topg.ops import Attention, Rope

torch = pytest.importorskip("torch")

from topg.backends.torch.attention import (  # noqa: E402  # after the check for torch
    Attend,
    flash_attention,
    plain_attention,
    rotate_pairs,
)
from topg.backends.torch.cache import PagedCache  # noqa: E402

Array = npt.NDArray[np.float64]
FloatArray = npt.NDArray[np.float32]
PAGE = 32


def _op(**changes: object) -> Attention:
    attributes: dict[str, object] = {
        "layer": 0, "heads": 6, "kv_heads": 2, "head_dim": 24, "scale": 0.2, "window": None, "softcap": None,
    }  # fmt: skip
    return Attention("attention", "out", "q", "k", "v", **(attributes | changes))  # type: ignore[arg-type]


def _reference(op: Attention, query: Array, key: Array, value: Array, start: int) -> Array:
    """query [tokens, heads, head_dim] at `start`; key and value [all tokens, kv_heads, head_dim]."""
    out = np.zeros_like(query)
    for token in range(len(query)):
        last = start + token + 1
        first = 0 if op.window is None else max(0, last - op.window)
        for head in range(op.heads):
            kv_head = head // (op.heads // op.kv_heads)
            scores = key[first:last, kv_head] @ query[token, head] * op.scale
            if op.softcap is not None:
                scores = op.softcap * np.tanh(scores / op.softcap)
            weights = np.exp(scores - scores.max())
            out[token, head] = weights / weights.sum() @ value[first:last, kv_head]
    return out


@pytest.mark.parametrize("attend", [flash_attention, plain_attention])
@pytest.mark.parametrize(
    ("op", "start", "tokens"),
    [
        (_op(), 0, 1),
        (_op(), 0, 70),
        (_op(), 255, 3),  # crosses a block of keys
        (_op(), 600, 40),
        (_op(heads=2), 31, 2),  # one query head for each KV head, crosses a page
        (_op(kv_heads=1), 10, 20),
        (_op(window=20), 0, 100),
        (_op(window=1), 5, 40),
        (_op(window=300), 500, 60),
        (_op(softcap=3.0), 100, 50),
        (_op(window=33, softcap=2.0, scale=1.0), 290, 33),
    ],
)
def test_paged_attention(attend: Attend, op: Attention, start: int, tokens: int) -> None:
    rng = np.random.default_rng(start + tokens)
    length = start + tokens
    query = rng.standard_normal((tokens, op.heads, op.head_dim)).astype(np.float32)
    key, value = rng.standard_normal((2, length, op.kv_heads, op.head_dim)).astype(np.float32)
    pages = rng.permutation(40)[: -(-length // PAGE)].tolist()
    cache = _filled_cache(op, key, value, pages)
    out = attend(op, torch.from_numpy(query), start, lambda first, last: cache.read(0, pages, first, last))
    expected = _reference(op, query.astype(float), key.astype(float), value.astype(float), start)
    np.testing.assert_allclose(out.numpy(), expected, rtol=0, atol=3e-6)


@pytest.mark.parametrize("attend", [flash_attention, plain_attention])
@pytest.mark.parametrize("op", [_op(), _op(window=300), _op(window=70, softcap=3.0), _op(heads=2)], ids=str)
def test_a_query_gets_the_same_bits_alone_and_in_any_chunk(attend: Attend, op: Attention) -> None:
    generator = torch.Generator().manual_seed(1)
    query = torch.randn(580, op.heads, op.head_dim, generator=generator)
    keys, values = torch.randn(2, op.kv_heads, 580, op.head_dim, generator=generator)
    whole = attend(op, query, 0, lambda first, last: (keys[:, first:last], values[:, first:last]))
    for first, last in ((0, 1), (300, 301), (579, 580), (250, 260), (13, 580)):
        part = attend(op, query[first:last], first, lambda first, last: (keys[:, first:last], values[:, first:last]))
        assert torch.equal(part, whole[first:last])


def _filled_cache(op: Attention, key: FloatArray, value: FloatArray, pages: list[int]) -> PagedCache:
    cache = PagedCache(KVGeometry(1, op.kv_heads, op.head_dim, "float32", PAGE), 40, torch.device("cpu"))
    positions = np.arange(len(key))
    page_of = torch.tensor([pages[position // PAGE] for position in positions])
    cache.append(0, page_of, torch.from_numpy(positions % PAGE), torch.from_numpy(key), torch.from_numpy(value))
    return cache


@pytest.mark.parametrize("dim", [24, 16, 2])
def test_rotation_turns_the_first_values_of_a_head_in_pairs(dim: int) -> None:
    rng = np.random.default_rng(dim)
    x = rng.standard_normal((5, 3, 24)).astype(np.float32)
    angles = Rope(dim, 10000.0).angles(np.array([0, 1, 9, 100, 4000]))
    cos, sin = (torch.from_numpy(f(angles).astype(np.float32)) for f in (np.cos, np.sin))
    rotated = rotate_pairs(torch.from_numpy(x), cos, sin).numpy()
    pairs = x[..., : dim // 2] + 1j * x[..., dim // 2 : dim]
    turned = pairs * np.exp(1j * angles)[:, None]
    np.testing.assert_allclose(rotated[..., :dim], np.concatenate((turned.real, turned.imag), -1), rtol=0, atol=1e-6)
    np.testing.assert_array_equal(rotated[..., dim:], x[..., dim:])


def test_bfloat16_pages_round_what_is_written() -> None:
    cache = PagedCache(KVGeometry(2, 1, 4, "bfloat16", PAGE), 2, torch.device("cpu"))
    key = torch.randn(3, 1, 4)
    cache.append(1, torch.tensor([1, 1, 0]), torch.tensor([30, 31, 0]), key, -key)
    keys, values = cache.read(1, [1, 0], 30, 33)
    expected = key.bfloat16().float().transpose(0, 1)
    assert torch.equal(keys, expected)
    assert torch.equal(values, -expected)
    assert cache.read(0, [1, 0], 0, 64)[0].abs().sum() == 0


@pytest.mark.parametrize(("first", "last"), [(0, 1), (5, 40), (31, 33), (64, 96), (40, 96)])
def test_only_the_slots_asked_for_are_read(first: int, last: int) -> None:
    """What else stands in the pages costs no time: the copy is no larger than the tokens."""
    op = _op()
    key, value = np.random.default_rng(0).standard_normal((2, 96, op.kv_heads, op.head_dim)).astype(np.float32)
    cache = _filled_cache(op, key, value, [7, 2, 9])
    for read, expected in zip(cache.read(0, [7, 2, 9], first, last), (key, value), strict=True):
        assert np.array_equal(read.numpy(), expected[first:last].transpose(1, 0, 2))
        assert read.untyped_storage().nbytes() == 2 * read.nbytes
