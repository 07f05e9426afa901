"""The compiler: what it fuses, what it must not fuse, and that a program computes what its plan says."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.interpreter import ProgramRun, run_plan
from support.memory_model import Dimensions, decoder_plan
from topg import ops
from topg.backends.native import program as native
from topg.backends.native.compiler import activations_of, compile_plan
from topg.errors import BackendError
from topg.ops import Attention, Op, Rope
from topg.plan import Plan, PlanBuilder
from topg.precision.formats import BFLOAT16, FLOAT32, INT4, INT8_ROTATED, INT8_WEIGHT_ONLY, Precision

WIDTH = 64
VOCAB = 7


class Build(PlanBuilder):
    """A builder of plans of one width, with a name for every op."""

    def __init__(self) -> None:
        super().__init__()
        self._count = 0

    def fresh(self) -> str:
        self._count += 1
        return f"op{self._count}"

    def project(self, x: str, out: str, bias: bool = False) -> str:
        return self.linear(x, self.fresh(), WIDTH, bias=bias, out=out)

    def normed(self, x: str, out: str, runs: int = 1) -> str:
        return self.norm(x, self.fresh(), 1e-5, runs=runs, out=out)

    def attend(self, query: str, key: str, value: str, out: str, head_dim: int = 32) -> str:
        heads, layer = WIDTH // head_dim, sum(isinstance(op, Attention) for op in self._ops)
        rope = Rope(head_dim, 100.0)
        return self.append(
            Attention(self.fresh(), out, query, key, value, layer, heads, heads, head_dim, head_dim**-0.5, rope)
        )

    def finish(self, x: str) -> Plan:
        self.logits(self.normed(self.select_rows(x, out=x), x), "head", VOCAB)
        return self.build()


def compiled(build: Build, x: str, precisions: dict[str, Precision] | None = None) -> native.Program:
    """The program of a plan, which computes the same; matrices are rotated int8 unless named otherwise."""
    plan = build.finish(x)
    program = compile_plan(plan, lambda name: (precisions or {}).get(name, INT8_ROTATED))
    assert_same_results(plan, program)
    return program


def assert_same_results(plan: Plan, program: native.Program, seed: int = 0) -> None:
    rng = np.random.default_rng(seed)
    shapes = {name: shape for op in plan.ops for name, shape in op.tensor_shapes().items()}
    tensors = {name: rng.standard_normal(shape) * shape[-1] ** -0.5 for name, shape in shapes.items()}
    tokens, selected = rng.integers(0, VOCAB, 5).tolist(), [1, 3, 4]
    wanted = run_plan(plan, tensors, tokens, selected)
    np.testing.assert_allclose(ProgramRun(program, tensors, tokens, selected, seed).logits(), wanted, rtol=1e-9)


def linears(program: native.Program) -> list[native.LinearStep]:
    return [step for step in program.steps if isinstance(step, native.LinearStep)]


def row_ops(program: native.Program, kind: type[Any]) -> list[Any]:
    steps = [step for step in program.steps if isinstance(step, native.RowStep)]
    return [op for step in steps for op in step.ops if isinstance(op, kind)]


def start() -> tuple[Build, str]:
    build = Build()
    return build, build.embed("embed", VOCAB, WIDTH)


# ---- what is fused --------------------------------------------------------------------------------------------------


def test_a_plain_decoder_has_seven_steps_a_layer() -> None:
    plan = decoder_plan(Dimensions(layers=2, head_dim=32, plain=True))
    program = compile_plan(plan, lambda name: INT8_ROTATED)
    kinds = [type(step).__name__.removesuffix("Step") for step in program.steps]
    layer = ["Row", "Linear", "Attention", "Linear", "Row", "Linear", "Linear"]
    assert kinds == [*layer, *layer, "Row", "Logits"]
    names = [name for step in program.steps for name in step.plan_ops]
    assert names == [op.name for op in plan.ops], "each op once, in order"
    assert row_ops(program, native.HeadsOp) == []


def test_query_key_and_value_become_one_step_with_their_norms() -> None:
    build, x = start()
    h = build.normed(x, "h")
    query, key, value = build.project(h, "q", bias=True), build.project(h, "k"), build.project(h, "v")
    query, key = build.normed(query, "q", runs=2), build.normed(key, "k", runs=2)
    program = compiled(build, build.add(x, build.project(build.attend(query, key, value, "a"), "h"), out="x"))
    step = linears(program)[0]
    assert step.heads is not None and step.heads.query_norm is not None and step.heads.key_norm is not None
    assert [part.buffer for part in step.parts] == [step.heads.query, step.heads.key, step.heads.value]
    assert step.parts[0].biases == ("op2.bias",)


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1)])
def test_heads_are_found_by_what_attention_reads(order: Sequence[int]) -> None:
    build, x = start()
    projected = [build.project(x, name) for name in ("a", "b", "c")]
    program = compiled(build, build.attend(*(projected[i] for i in order), "x"))
    assert linears(program)[0].heads is not None


def test_gate_and_up_are_interleaved_and_written_as_the_next_linear_wants_them() -> None:
    build, x = start()
    gate, up = build.project(x, "gate", bias=True), build.project(x, "up", bias=True)
    program = compiled(build, build.project(build.gate(gate, up, "silu", out="gate"), "x"))
    part = linears(program)[0].parts[0]
    assert part.weights == ("op1.weight", "op2.weight") and part.biases == ("op1.bias", "op2.bias")
    assert part.epilogue == "gate" and part.buffer is None and part.activations == linears(program)[1].x


def test_up_before_gate_is_the_same() -> None:
    build, x = start()
    up, gate = build.project(x, "up"), build.project(x, "gate")
    program = compiled(build, build.project(build.gate(gate, up, "silu", out="up"), "x"))
    assert linears(program)[0].parts[0].weights == ("op2.weight", "op1.weight")


def test_a_linear_and_its_activation_are_one() -> None:
    build, x = start()
    up = build.project(x, "up", bias=True)
    program = compiled(build, build.project(build.activation(up, "gelu", out="up"), "x"))
    part = linears(program)[0].parts[0]
    assert (part.epilogue, part.function, part.buffer) == ("activate", "gelu", None)


def test_a_residual_is_added_to_in_its_place() -> None:
    build, x = start()
    h = build.project(build.normed(x, "h"), "h")
    program = compiled(build, build.add(h, x, out="y"))
    part = linears(program)[0].parts[0]
    assert part.epilogue == "add" and part.buffer == row_ops(program, native.EmbedOp)[0].out
    assert row_ops(program, native.AddOp) == []


def test_a_norm_that_only_linears_read_stays_in_the_scratch_row() -> None:
    build, x = start()
    program = compiled(build, build.project(build.normed(x, "h"), "y"))
    assert row_ops(program, native.NormOp)[0].out == native.SCRATCH


def test_a_norm_before_its_residual_stays_in_the_scratch_row() -> None:
    build, x = start()
    h = build.normed(build.project(build.normed(x, "h"), "h"), "h")
    program = compiled(build, build.add(x, h, out="x"))
    (add,) = row_ops(program, native.AddOp)
    assert add.right == native.SCRATCH and add.left == add.out, "and the sum replaces the residual"


def test_one_value_is_prepared_once_for_each_form() -> None:
    build, x = start()
    parts = [build.project(x, name) for name in ("a", "b", "c", "d")]
    y = build.add(build.add(*parts[:2], out="e"), build.add(*parts[2:], name="other", out="f"), name="last", out="x")
    program = compiled(build, y, {"op1.weight": BFLOAT16, "op3.weight": BFLOAT16})
    forms = [program.activations[op.activations].code for op in row_ops(program, native.PrepareOp)]
    assert sorted(forms[:2]) == ["bfloat16", "int8"] and len(forms) == 3, "and one for the head"


# ---- what is not ----------------------------------------------------------------------------------------------------


def test_a_residual_that_is_read_again_is_not_overwritten() -> None:
    build, x = start()
    y = build.add(x, build.project(x, "h"), out="y")
    program = compiled(build, build.add(x, y, name="again", out="z"))
    assert linears(program)[0].parts[0].epilogue == "store" and len(row_ops(program, native.AddOp)) == 2


def test_a_linear_that_is_read_elsewhere_is_stored() -> None:
    build, x = start()
    h = build.project(x, "h")
    y = build.add(x, h, out="x")
    program = compiled(build, build.add(y, h, name="again", out="x"))
    assert linears(program)[0].parts[0].epilogue == "store"


def test_parallel_branches_keep_the_order_of_their_sums() -> None:
    build, x = start()
    attention = build.project(build.normed(x, "h"), "attention")
    h = build.normed(x, "h")
    up = build.activation(build.project(h, "up"), "gelu", out="up")
    branches = build.add(build.project(up, "h"), attention, name="branches", out="h")
    program = compiled(build, build.add(branches, x, out="x"))
    assert [step.parts[0].epilogue for step in linears(program)] == ["store", "activate", "add"]
    assert len(row_ops(program, native.AddOp)) == 1


def test_gate_and_up_of_different_formats_are_not_interleaved() -> None:
    build, x = start()
    gate, up = build.project(x, "gate"), build.project(x, "up")
    y = build.project(build.gate(gate, up, "silu", out="gate"), "x")
    program = compiled(build, y, {"op1.weight": INT4, "op2.weight": INT8_ROTATED})
    assert len(row_ops(program, native.GateOp)) == 1


def test_gate_and_up_are_not_interleaved_with_one_bias() -> None:
    build, x = start()
    gate, up = build.project(x, "gate", bias=True), build.project(x, "up")
    program = compiled(build, build.project(build.gate(gate, up, "silu", out="gate"), "x"))
    assert len(row_ops(program, native.GateOp)) == 1


def test_a_gate_that_others_read_stands_in_a_buffer() -> None:
    build, x = start()
    gate, up = build.project(x, "gate"), build.project(x, "up")
    gated = build.gate(gate, up, "silu", out="gated")
    program = compiled(build, build.add(gated, build.project(gated, "h"), out="x"))
    assert linears(program)[0].parts[0].buffer is not None


def test_small_heads_are_finished_by_a_row_step() -> None:
    build, x = start()
    query, key, value = (build.project(x, name) for name in ("q", "k", "v"))
    program = compiled(build, build.attend(query, key, value, "x", head_dim=16))
    assert linears(program)[0].heads is None and len(row_ops(program, native.HeadsOp)) == 1


@pytest.mark.parametrize("names", [("q", "q", "v"), ("q", "k", "q"), ("q", "k", "k"), ("q", "q", "q")])
def test_heads_that_are_one_value_are_copied_before_they_are_turned(names: Sequence[str]) -> None:
    build, x = start()
    made = {name: build.project(x, name) for name in dict.fromkeys(names)}
    compiled(build, build.attend(*(made[name] for name in names), "x"))


def test_a_query_that_is_read_later_is_copied_before_it_is_turned() -> None:
    build, x = start()
    query, key, value = (build.project(x, name) for name in ("q", "k", "v"))
    attended = build.attend(query, key, value, "a")
    compiled(build, build.add(build.add(attended, query, out="b"), key, name="again", out="c"))


# ---- what is refused ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Negate(Op):
    kind: ClassVar[str] = "negate"
    buffer_fields: ClassVar[tuple[str, ...]] = ("input",)

    input: str


def _changed(change: Callable[[tuple[Op, ...]], tuple[Op, ...]]) -> Plan:
    plan = decoder_plan(Dimensions())
    return Plan(change(plan.ops), plan.buffers)


def test_an_op_without_a_kernel_is_refused_by_name() -> None:
    plan = _changed(lambda old: (old[0], Negate("turned", "x", "x"), *old[1:]))
    with pytest.raises(BackendError, match=r"no kernel for op 'negate' \('turned'\); it has: activation, add.*torch"):
        compile_plan(plan, lambda name: FLOAT32)


def test_a_plan_must_select_rows_once() -> None:
    for plan in (
        _changed(lambda old: tuple(op for op in old if not isinstance(op, ops.SelectRows))),
        _changed(lambda old: (*old[:-1], ops.SelectRows("again", "x", "x", 64), old[-1])),
    ):
        with pytest.raises(BackendError, match="one select_rows op"):
            compile_plan(plan, lambda name: FLOAT32)


def test_rows_that_were_not_selected_are_gone() -> None:
    build, x = start()
    selected = build.select_rows(x, out="selected")
    build.logits(build.add(selected, x, out="sum"), "head", VOCAB)
    with pytest.raises(BackendError, match="'residual' stands after select_rows"):
        compile_plan(build.build(), lambda name: FLOAT32)


@pytest.mark.parametrize(("precision", "message"), [
    (Precision("float32", "int8"), "int8 activations need a grouped weight"),
    (Precision("int8", "int8", group_size=64, activation_group=32, scale="float32"), "whole groups"),
    (Precision("int8", "bfloat16", group_size=48, scale="float32"), "groups must divide 64"),
], ids=["ungrouped", "small activation groups", "odd groups"])  # fmt: skip
def test_a_precision_without_a_kernel_is_refused_by_name(precision: Precision, message: str) -> None:
    with pytest.raises(BackendError, match=f"tensor 'w': .*{message}"):
        activations_of("w", precision, 64)


# ---- any plan -------------------------------------------------------------------------------------------------------

BUFFERS = ("x", "a", "b", "c")
PRECISIONS = (FLOAT32, BFLOAT16, INT8_ROTATED, INT8_WEIGHT_ONLY, INT4)


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    """Ops that read any buffer written so far and write any of few, in the shapes that tempt to a fusion."""
    build, x = start()
    written = [x]

    def source() -> str:
        return draw(st.sampled_from(written))

    def target() -> str:
        return draw(st.sampled_from(BUFFERS))

    for _ in range(draw(st.integers(1, 7))):
        match draw(st.integers(0, 8)):
            case 0:
                out = build.normed(source(), target())
            case 1:
                out = build.project(source(), target(), draw(st.booleans()))
            case 2:
                out = build.append(ops.Add(build.fresh(), target(), source(), source(), WIDTH))
            case 3:
                out = build.append(ops.Scale(build.fresh(), target(), source(), 0.5, WIDTH))
            case 4:
                linear = build.project(source(), target())
                out = build.append(ops.Activation(build.fresh(), target(), linear, "gelu", WIDTH))
            case 5:
                linear = build.project(source(), target())
                out = build.append(ops.Add(build.fresh(), target(), source(), linear, WIDTH))
            case 6:
                x = source()
                gate, up = build.project(x, draw(st.sampled_from(("a", "b")))), build.project(x, "c")
                out = build.append(ops.Gate(build.fresh(), target(), gate, up, "silu", WIDTH))
            case 7:
                x = source()
                query, key, value = (build.project(x, name) for name in ("query", "key", "value"))
                if draw(st.booleans()):
                    query = build.normed(query, "query", runs=2)
                out = build.attend(query, key, draw(st.sampled_from((value, source()))), target())
                written += [query, key, value]
            case _:
                out = build.attend(source(), source(), source(), target(), draw(st.sampled_from((16, 32))))
        written.append(out)
        written = list(dict.fromkeys(name for name in written if build.width(name) == WIDTH))
    return build.finish(source())


@settings(max_examples=150, deadline=None)
@given(plan=plans(), data=st.data())
def test_any_plan_computes_the_same_compiled(plan: Plan, data: st.DataObject) -> None:
    tensors = sorted({name for op in plan.ops for name in op.tensors()})
    precisions = {name: data.draw(st.sampled_from(PRECISIONS), name) for name in tensors}
    assert_same_results(plan, compile_plan(plan, precisions.__getitem__))
