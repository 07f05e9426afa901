"""Costs and shapes of operations."""

from __future__ import annotations

import itertools

import pytest

from topg.ops import Attention, Linear, SelectRows, Workload


def attention(window: int | None) -> Attention:
    return Attention("attend", "out", "q", "k", "v", 0, 2, 1, 4, 0.5, window=window)


@pytest.mark.parametrize("window", [None, 1, 5, 8, 100])
def test_attention_counts_the_pairs_it_looks_at(window: int | None) -> None:
    for tokens, context in itertools.product((0, 1, 3, 8, 20), (0, 1, 4, 5, 7, 30)):
        seen = [min(window or context + i + 1, context + i + 1) for i in range(tokens)]
        assert attention(window).flops(Workload(tokens, context, 1)) == 4 * 2 * 4 * sum(seen)


def test_attention_over_a_window_is_costed_without_a_loop() -> None:
    tokens = 10**15  # a loop over them would not end
    assert attention(8).flops(Workload(tokens, 0, 1)) == 4 * 2 * 4 * (8 * 9 // 2 + (tokens - 8) * 8)


def test_ops_say_what_shapes_their_tensors_have() -> None:
    assert Linear("up", "h", "x", "up.weight", None, 8, 20).tensor_shapes() == {"up.weight": (20, 8)}
    assert Linear("up", "h", "x", "up.weight", "up.bias", 8, 20).tensor_shapes()["up.bias"] == (20,)
    assert SelectRows("rows", "x", "x", 8).tensor_shapes() == {}
