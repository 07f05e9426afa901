"""Building, checking, storing and costing plans."""

from __future__ import annotations

import pytest

from topg.errors import CheckpointError, UnsupportedModelError
from topg.ops import Workload
from topg.plan import Plan, PlanBuilder
from topg.plan_cost import TensorInfo, folded, human_bytes, human_count, plan_cost
from topg.precision.formats import FLOAT32, INT8_ROTATED


def two_layers() -> Plan:
    b = PlanBuilder()
    x = b.embed("embed", 100, 64)
    for layer in range(2):
        with b.scope(f"layers.{layer}"):
            h = b.norm(x, "norm", 1e-5, out="h")
            x = b.add(x, b.linear(h, "up", 64, out="h"), out="x")
    b.logits(b.select_rows(x), "embed", 100)
    return b.build()


def test_scopes_name_ops_and_tensors() -> None:
    plan = two_layers()
    assert plan.tensor_names == (
        "embed.weight", "layers.0.norm.weight", "layers.0.up.weight", "layers.1.norm.weight", "layers.1.up.weight",
    )  # fmt: skip
    assert plan.vocab == 100 and plan.buffers["h"] == 64


def test_a_buffer_must_be_written_before_it_is_read() -> None:
    with pytest.raises(CheckpointError, match="'norm' reads buffer 'y', which nothing wrote"):
        PlanBuilder().append(_norm("y", 64))


def test_widths_must_fit() -> None:
    b = PlanBuilder()
    b.embed("embed", 100, 64)
    with pytest.raises(CheckpointError, match="norm 'norm': x is 64 wide, expected 48"):
        b.append(_norm("x", 48))


def test_a_plan_ends_in_logits() -> None:
    b = PlanBuilder()
    b.embed("embed", 100, 64)
    with pytest.raises(CheckpointError, match="must end in a logits op"):
        b.build()


@pytest.mark.parametrize(
    ("change", "message"),
    [({"op": "levitate"}, "'levitate' is not registered"), ({"op": "add", "twist": 1}, "no attribute 'twist'"),
     ({"op": "add", "name": "a"}, "incomplete")],
)  # fmt: skip
def test_stored_plans_are_checked(change: dict[str, object], message: str) -> None:
    with pytest.raises((CheckpointError, UnsupportedModelError), match=message):
        Plan.from_json([change])


def test_names_are_unique() -> None:
    data = two_layers().to_json()
    with pytest.raises(CheckpointError, match="two ops of the plan are named 'embed'"):
        Plan.from_json([data[0], *data])


def test_costs_count_tied_weights_once_and_fold_equal_layers() -> None:
    plan = two_layers()
    tensors = {name: TensorInfo((64,) if "norm" in name else (64, 64), FLOAT32) for name in plan.tensor_names}
    tensors["embed.weight"] = TensorInfo((100, 64), INT8_ROTATED)
    lines = plan_cost(plan, tensors, Workload(tokens=10, context=5, logits_rows=2), kv_value_bytes=2)
    by_name = {line.name: line for line in lines}
    assert by_name["layers.0.up"].flops == 2 * 64 * 64 * 10
    assert by_name["layers.0.up"].weight_bytes == 64 * 64 * 4
    assert by_name["embed"].weight_bytes == 100 * 64 + 100 * 2 and by_name["logits"].weight_bytes == 0
    assert by_name["logits"].output == (2, 100) and by_name["logits"].flops == 2 * 64 * 100 * 2
    assert [(block.first, block.repeats) for block in folded(lines)] == [(None, 1), (0, 2), (None, 1)]


def test_human_units() -> None:
    assert (human_bytes(999), human_bytes(1234), human_bytes(98_362_432)) == ("999 B", "1.23 kB", "98.4 MB")
    assert (human_count(999), human_count(2_500_000_000)) == ("999", "2.5 G")


def _norm(x: str, width: int):  # type: ignore[no-untyped-def]
    from topg.ops import Norm

    return Norm("norm", "h", x, "rms", "norm.weight", None, width, 1, 1e-5)
