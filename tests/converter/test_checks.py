from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from topg.converter.checks import (
    check_config,
    check_none_unused,
    check_special_tokens,
    check_tensors,
    check_tensors_fit_plan,
    check_vocabulary,
)
from topg.errors import CheckpointError
from topg.models.base import DecoderConfig, Source, TensorSpec
from topg.ops import Rope
from topg.plan import PlanBuilder
from topg.tokenizer.special import SpecialTokens


class Stored:
    """Shapes of stored tensors."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self._shapes = shapes
        self.tensor_names = shapes.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shapes[name]


def _use(name: str, shape: tuple[int, ...], rows: list[int] | None = None, stored: int | None = None,
         source_name: str = "stored") -> tuple[TensorSpec, Source]:  # fmt: skip
    source = Source(source_name, None if rows is None else np.array(rows), stored)
    return TensorSpec(name, "query", shape, 0, source, source), source


def _config(**changes: Any) -> DecoderConfig:
    config = DecoderConfig(
        layers=2, hidden=64, intermediate=128, heads=4, kv_heads=2, head_dim=16, vocab=320, context=512, norm_eps=1e-5,
        activation="silu", tied=False, ropes=(Rope(16, 1e4),) * 2, windows=(None,) * 2, query_scale=0.25,
    )  # fmt: skip
    return replace(config, **changes)


def test_a_sane_config_passes() -> None:
    check_config(_config(), 21)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layers": 10**6}, "1000000 as layers; expected 1 to 1024"),
        ({"layers": 0}, "0 as layers"),
        ({"layers": 30}, "30 layers, but only 21 tensors are stored"),
        ({"hidden": 2**21}, "hidden size"),
        ({"intermediate": 2**21}, "intermediate size"),
        ({"heads": 2**11, "head_dim": 2**11}, "attention heads times head size"),
        ({"kv_heads": 2**17}, "key/value heads times head size"),
        ({"vocab": 2**25}, "vocabulary size"),
        ({"context": 2**32}, "context length"),
    ],
)
def test_sizes_out_of_reason_are_refused(changes: dict[str, int], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        check_config(_config(**changes), 21)


def test_fused_tensors_that_are_used_up_pass() -> None:
    check_tensors([_use("q", (2, 8), [0, 2], 4), _use("k", (2, 8), [3, 1], 4)], Stored({"stored": (4, 8)}))


@pytest.mark.parametrize(
    ("uses", "shapes", "message"),
    [
        ([_use("q", (2, 8))], {}, r"lacks 1 tensor\(s\) its config asks for: 'stored'"),
        ([_use("q", (2, 8))], {"stored": (8, 2)}, r"tensor stored has shape \[8, 2\]; expected \[2, 8\]"),
        ([_use("q", (2, 8))], {"stored": (16,)}, r"tensor stored has shape \[16\]; expected \[2, 8\]"),
        ([_use("q", (2, 8), [0, 1], 4)], {"stored": (4, 8)}, "row 2 of tensor stored would be used 0 times"),
        ([_use("q", (2, 8), [1, 1], 2)], {"stored": (2, 8)}, "row 0 of tensor stored would be used 0 times"),
        ([_use("q", (2, 8)), _use("k", (2, 8))], {"stored": (2, 8)}, "row 0 of tensor stored would be used 2 times"),
    ],
)
def test_tensors_that_do_not_fit_are_named(
    uses: list[tuple[TensorSpec, Source]], shapes: dict[str, tuple[int, ...]], message: str
) -> None:
    with pytest.raises(CheckpointError, match=message):
        check_tensors(uses, Stored(shapes))


def test_long_lists_of_names_are_cut() -> None:
    uses = [_use(f"t{i}", (2,), source_name=f"t{i}") for i in range(9)]
    with pytest.raises(CheckpointError, match=r"lacks 9 tensor\(s\).*: 't0', 't1', 't2', 't3', 't4' and 4 more"):
        check_tensors(uses, Stored({}))


def test_unused_tensors_are_named() -> None:
    check_none_unused({"a"}, {"b"}, {"a", "b"})
    with pytest.raises(CheckpointError, match=r"holds 1 tensor\(s\) that its architecture does not use: 'c'"):
        check_none_unused({"a"}, {"b"}, {"a", "b", "c"})


def test_the_embedding_may_have_spare_rows_but_not_too_few() -> None:
    check_vocabulary(300, 320)
    with pytest.raises(CheckpointError, match="321 tokens, but the model has only 320"):
        check_vocabulary(321, 320)


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        (SpecialTokens(320, True, (0,), None, None, ()), "the bos token is 320"),
        (SpecialTokens(None, False, (0, 400), None, None, ()), "the eos token is 400"),
        (SpecialTokens(None, False, (), 320, None, ()), "the pad token is 320"),
        (SpecialTokens(None, False, (), None, 320, ()), "the unk token is 320"),
        (SpecialTokens(None, False, (), None, None, (1, 320)), "the chat marker token is 320"),
    ],
)
def test_special_tokens_are_rows(tokens: SpecialTokens, message: str) -> None:
    with pytest.raises(CheckpointError, match=rf"{message}; ids of this model are 0 to 319"):
        check_special_tokens(tokens, 320)


def test_tensors_must_be_those_of_the_plan() -> None:
    b = PlanBuilder()
    x = b.norm(b.embed("embed", 20, 8), "norm", 1e-5, kind="layer", bias=True, out="x")
    x = b.linear(x, "up", 4, bias=True, out="h")
    b.logits(x, "head", 20)
    plan = b.build()
    shapes = {"embed.weight": (20, 8), "norm.weight": (8,), "norm.bias": (8,), "up.weight": (4, 8), "up.bias": (4,),
              "head.weight": (20, 4)}  # fmt: skip
    check_tensors_fit_plan(plan, shapes)
    for name, shape in shapes.items():
        with pytest.raises(CheckpointError, match=f"do not exist: '{name}'"):
            check_tensors_fit_plan(plan, {other: shapes[other] for other in shapes if other != name})
        with pytest.raises(CheckpointError, match=rf"{name} .* has shape \[99\]; expected \[{shape[0]}"):
            check_tensors_fit_plan(plan, shapes | {name: (99,)})
