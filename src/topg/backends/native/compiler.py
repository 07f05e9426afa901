"""From a plan to a native program: neighbouring ops are fused, and buffers are given out anew.

What is fused, each group standing next to each other in the plan:

    linears of one input                    one step
    query, key, value, head norms           one step that also rotates and appends to the pages
    gate, up, activation                    one linear of interleaved channels
    linear, activation                      one step
    linear, add                             added into the residual's buffer
    norms, adds, whatever works on a row    one step, from which linears find their input prepared

and where only linears of one form read an activation, gate or attention, it is written in that form.  A fusion needs
that nobody else reads what is not written any more; an op that fits nowhere is a step of its own.

Values (see `dataflow`) stand in buffers until their last reader.  A row op may write the buffer it reads; a linear and
an attention never write what another thread may still read.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from topg import ops
from topg.backends.native import program as native
from topg.backends.native.dataflow import Dataflow, Names
from topg.errors import BackendError
from topg.plan import Plan
from topg.precision.formats import Precision
from topg.precision.rotation import ROTATION_GROUP

BLOCK_CHANNELS = 32  # kBlockChannels of native/kernels/layout.h

Precisions = Callable[[str], Precision]

# Ops that work on a row of buffers, and may read a thread's scratch row.
_ROW_OPS = (ops.Norm, ops.Add, ops.Scale, ops.Activation, ops.Gate)
_OPS = (ops.Embed, ops.Linear, ops.Attention, ops.SelectRows, ops.Logits, *_ROW_OPS)


def compile_plan(plan: Plan, precision: Precisions) -> native.Program:
    """The program of a plan whose tensors have these precisions.

    Raises BackendError naming the op or tensor that the native back end cannot run.
    """
    _check_ops(plan)
    return _Compiler(plan, precision).compile()


def activations_of(tensor: str, precision: Precision, columns: int) -> native.Activations:
    """The form in which a weight [rows, columns] takes its input; raises BackendError where there is none."""
    code, size = precision.activations, precision.group_size
    if code == "int8":
        group = precision.activation_group
        if size is None or group is None or group % size:
            raise BackendError(
                f"tensor {tensor!r}: {precision.describe()} with groups of {group} activations has no native kernel; "
                "int8 activations need a grouped weight, and their groups whole groups of it"
            )
        return native.Activations(code, columns, group, size, precision.rotated)
    if size is None:
        return native.Activations(code, columns)
    if ROTATION_GROUP % size:
        raise BackendError(
            f"tensor {tensor!r}: {precision.describe()} has no native kernel; groups must divide {ROTATION_GROUP}"
        )
    return native.Activations(code, columns, 0, ROTATION_GROUP, precision.rotated)


def _check_ops(plan: Plan) -> None:
    for op in plan.ops:
        if type(op) not in _OPS:
            kinds = ", ".join(sorted(kind.kind for kind in _OPS))
            raise BackendError(
                f"the native back end has no kernel for op {op.kind!r} ({op.name!r}); it has: {kinds}; "
                "choose execution.backend torch and give it a kernel"
            )
    selections = [index for index, op in enumerate(plan.ops) if isinstance(op, ops.SelectRows)]
    if len(selections) != 1:
        raise BackendError("the plan must have one select_rows op, which picks the rows that logits are wanted for")
    (selection,), flow = selections, Dataflow(plan.ops)
    for index in range(selection + 1, len(plan.ops)):
        op = plan.ops[index]
        if isinstance(op, (ops.Embed, ops.Attention)) or min(flow.inputs[index]) < selection:
            raise BackendError(f"{op.kind} {op.name!r} stands after select_rows and works on rows that are gone then")


class _Compiler:
    def __init__(self, plan: Plan, precision: Precisions) -> None:
        self._ops = plan.ops
        self._flow = Dataflow(plan.ops)
        self._precision = precision
        self._widths = _widths(plan)
        self._forms = [self._form(op) for op in plan.ops]
        self._steps: list[native.Step] = []
        self._row_ops: list[native.RowOp] = []
        self._row_names: list[str] = []
        self._buffers: Names[int] = Names()
        self._activations: Names[native.Activations] = Names()
        self._buffer_of: dict[int, str] = {}
        self._prepared: dict[tuple[int, native.Activations], str] = {}

    def compile(self) -> native.Program:
        index = 0
        while index < len(self._ops):
            index += self._emit(index)
        return native.Program(tuple(self._steps), dict(self._buffers.kinds), dict(self._activations.kinds))

    def _emit(self, index: int) -> int:
        """Emit the op at `index` with those after it that can be fused to it; returns how many these are."""
        op = self._ops[index]
        if isinstance(op, ops.Linear):
            fusions = (self._heads, self._gated, self._activated, self._added, self._linears)
            return next(count for fuse in fusions if (count := fuse(index)))
        if isinstance(op, ops.Attention):
            self._attend(index, op)
        elif isinstance(op, ops.Logits):
            self._step(native.LogitsStep((op.name,), self._input(index), op.weight, op.softcap))
        else:
            self._row_op(index)
        return 1

    # ---- linears ----------------------------------------------------------------------------------------------

    def _heads(self, index: int) -> int:
        """Query, key and value, norms of their heads, and attention."""
        end = index + 3
        while end < len(self._ops) and isinstance(self._ops[end], ops.Norm):
            end += 1
        attention = self._ops[end] if end < len(self._ops) else None
        if not isinstance(attention, ops.Attention) or attention.head_dim % BLOCK_CHANNELS:
            return 0
        sources = [self._head_source(value, end) for value in self._flow.inputs[end]]
        linears = [source[0] for source in sources]
        norms = [source[1] for source in sources]
        if sorted(linears) != [index, index + 1, index + 2] or norms[2] is not None:
            return 0
        if len(self._run(index)) < 3 or sum(norm is not None for norm in norms) != end - index - 3:
            return 0
        parts = [self._stored(linear) for linear in linears]
        query, key, value = (self._buffer_of[linear] for linear in linears)
        heads = native.HeadsOp(attention, query, key, value, norms[0], norms[1])
        names = tuple(op.name for op in self._ops[index:end])
        self._step(native.LinearStep(names, self._input(index), tuple(parts), heads))
        self._expire(end - 1)
        self._attention_step(end, attention)
        return end - index + 1

    def _head_source(self, value: int, attention: int) -> tuple[int, native.Norm | None]:
        """The op that a head's values come from, and the norm between, where attention alone reads them."""
        op = self._ops[value]
        if not self._flow.read_only_by(value, attention) or self._flow.inputs[attention].count(value) > 1:
            return -1, None
        if not isinstance(op, ops.Norm):
            return value, None
        (source,) = self._flow.inputs[value]
        wide = op.width == self._attention_at(attention).head_dim
        return (source, _norm(op)) if wide and self._flow.read_only_by(source, value) else (-1, None)

    def _attention_at(self, index: int) -> ops.Attention:
        op = self._ops[index]
        assert isinstance(op, ops.Attention)
        return op

    def _gated(self, index: int) -> int:
        """Gate and up projection and the gate itself."""
        if index + 2 >= len(self._ops) or len(self._run(index)) < 2:
            return 0
        gate = self._ops[index + 2]
        if not isinstance(gate, ops.Gate) or sorted(self._flow.inputs[index + 2]) != [index, index + 1]:
            return 0
        first, second = (self._linear_at(value) for value in self._flow.inputs[index + 2])
        alone = all(self._flow.read_only_by(value, index + 2) for value in (index, index + 1))
        same_format = self._precision(first.weight) == self._precision(second.weight)
        same_biases = (first.bias is None) == (second.bias is None)
        if not (alone and same_format and same_biases and first.out_features == second.out_features):
            return 0
        biases = tuple(bias for bias in (first.bias, second.bias) if bias is not None)
        buffer, activations = self._target(index + 2)
        part = native.LinearPart((first.weight, second.weight), biases, "gate", gate.function, buffer, activations)
        self._linear_step(index, index + 3, part)
        return 3

    def _activated(self, index: int) -> int:
        """A linear and the function of it."""
        function = self._ops[index + 1] if index + 1 < len(self._ops) else None
        if not isinstance(function, ops.Activation) or not self._flow.read_only_by(index, index + 1):
            return 0
        op = self._linear_at(index)
        buffer, activations = self._target(index + 1)
        part = native.LinearPart((op.weight,), _biases(op), "activate", function.function, buffer, activations)
        self._linear_step(index, index + 2, part)
        return 2

    def _added(self, index: int) -> int:
        """A linear added to a residual that nobody reads afterwards."""
        add = self._ops[index + 1] if index + 1 < len(self._ops) else None
        if not isinstance(add, ops.Add) or not self._flow.read_only_by(index, index + 1):
            return 0
        residuals = [value for value in self._flow.inputs[index + 1] if value != index]
        if len(residuals) != 1 or self._last_read(residuals[0]) > index + 1:
            return 0
        op, buffer = self._linear_at(index), self._buffer_of.pop(residuals[0])
        self._buffer_of[index + 1] = buffer
        self._linear_step(index, index + 2, native.LinearPart((op.weight,), _biases(op), "add", None, buffer))
        return 2

    def _linears(self, index: int) -> int:
        """Linears of one input, each into a buffer."""
        run = self._run(index)
        parts = [self._stored(linear) for linear in run]
        self._linear_step(index, run.stop, *parts)
        return len(run)

    def _run(self, index: int) -> range:
        """The linears from `index` on that share its input in one form."""
        end = index
        while (
            end < len(self._ops)
            and isinstance(self._ops[end], ops.Linear)
            and self._flow.inputs[end] == self._flow.inputs[index]
            and self._forms[end] == self._forms[index]
        ):
            end += 1
        return range(index, end)

    def _stored(self, linear: int) -> native.LinearPart:
        op = self._linear_at(linear)
        return native.LinearPart((op.weight,), _biases(op), buffer=self._take_buffer(linear))

    def _linear_at(self, index: int) -> ops.Linear:
        op = self._ops[index]
        assert isinstance(op, ops.Linear)
        return op

    def _linear_step(self, index: int, end: int, *parts: native.LinearPart) -> None:
        names = tuple(op.name for op in self._ops[index:end])
        self._step(native.LinearStep(names, self._input(index), parts))
        for value in range(index, end):
            self._prepare(value)
        self._expire(end - 1)

    # ---- attention --------------------------------------------------------------------------------------------

    def _attend(self, index: int, op: ops.Attention) -> None:
        """Attention whose heads come from anywhere: a row op puts them where it finds them."""
        query, key, value = self._flow.inputs[index]
        copies = [self._copy(source) for source in (query, key) if self._is_read_elsewhere(source, index)]
        places = iter(copies)
        query_place, key_place = (
            next(places) if self._is_read_elsewhere(source, index) else self._buffer_of[source]
            for source in (query, key)
        )
        self._row_ops.append(native.HeadsOp(op, query_place, key_place, self._buffer_of[value]))
        self._row_names.append(op.name)
        for copy in copies:
            self._buffers.release(copy)
        self._attention_step(index, op)

    def _is_read_elsewhere(self, value: int, attention: int) -> bool:
        """Whether a query or key, which attention overwrites, has another use."""
        return self._flow.inputs[attention].count(value) > 1 or self._last_read(value) > attention

    def _copy(self, value: int) -> str:
        source = self._buffer_of[value]
        copy = self._buffers.take("copy", self._buffers.kinds[source])
        self._row_ops.append(native.ScaleOp(source, 1.0, copy))
        return copy

    def _attention_step(self, index: int, op: ops.Attention) -> None:
        buffer, activations = self._target(index, op.heads // op.kv_heads * op.head_dim)
        self._step(native.AttentionStep((op.name,), op, buffer, activations))
        self._prepare(index)
        self._expire(index)

    # ---- work on rows -----------------------------------------------------------------------------------------

    def _row_op(self, index: int) -> None:
        op = self._ops[index]
        if isinstance(op, ops.SelectRows):
            self._flush_rows()
        sources = [self._buffer_of[value] for value in self._flow.inputs[index]]
        if not isinstance(op, ops.SelectRows):  # it reads other rows than the one it writes
            self._expire(index)
        target = self._row_target(index)
        self._row_ops.append(_row_op(op, sources, target))
        self._row_names.append(op.name)
        self._prepare(index)
        self._expire(index)

    def _row_target(self, index: int) -> str:
        """The scratch row for a norm that only linears or the next row op read, else a buffer."""
        next_op = self._ops[index + 1]
        is_next = isinstance(next_op, _ROW_OPS) and index in self._flow.inputs[index + 1]
        last_allowed = index + 1 if is_next else index
        if isinstance(self._ops[index], ops.Norm) and self._last_read(index) <= last_allowed:
            self._buffer_of[index] = native.SCRATCH
            return native.SCRATCH
        return self._take_buffer(index)

    def _prepare(self, value: int) -> None:
        """Prepare a value for every form in which linears read it, unless that stands there already."""
        for form in self._wanted_forms(value):
            if (value, form) not in self._prepared:
                name = self._activations.take(_name(form), form)
                self._prepared[value, form] = name
                self._row_ops.append(native.PrepareOp(self._buffer_of[value], name))

    def _step(self, step: native.Step) -> None:
        self._flush_rows()
        self._steps.append(step)

    def _flush_rows(self) -> None:
        if self._row_ops:
            self._steps.append(native.RowStep(tuple(self._row_names), tuple(self._row_ops)))
        self._row_ops, self._row_names = [], []

    # ---- values and their places ------------------------------------------------------------------------------

    def _form(self, op: ops.Op) -> native.Activations | None:
        """What a linear's input must be prepared as."""
        if not isinstance(op, (ops.Linear, ops.Logits)):
            return None
        return activations_of(op.weight, self._precision(op.weight), op.in_features)

    def _wanted_forms(self, value: int) -> list[native.Activations]:
        forms = (self._forms[reader] for reader in self._flow.readers[value])
        return list(dict.fromkeys(form for form in forms if form is not None))

    def _last_read(self, value: int) -> int:
        """The last op that reads a value from a buffer; the value itself when none does."""
        return max((reader for reader in self._flow.readers[value] if self._forms[reader] is None), default=value)

    def _last_multiplied(self, value: int, form: native.Activations) -> int:
        return max(reader for reader in self._flow.readers[value] if self._forms[reader] == form)

    def _input(self, linear: int) -> str:
        """Where a linear's input stands."""
        form = self._forms[linear]
        assert form is not None
        return self._prepared[self._flow.inputs[linear][0], form]

    def _target(self, value: int, share: int = 0) -> tuple[str | None, str | None]:
        """Buffer or activations for a result; whoever computes `share` columns of it can prepare whole groups."""
        forms = self._wanted_forms(value)
        if len(forms) == 1 and self._last_read(value) == value:
            unit = math.lcm(forms[0].group or 1, ROTATION_GROUP)
            if share % unit == 0 and unit == max(forms[0].group, ROTATION_GROUP):
                self._prepared[value, forms[0]] = self._activations.take(_name(forms[0]), forms[0])
                return None, self._prepared[value, forms[0]]
        return self._take_buffer(value), None

    def _take_buffer(self, value: int) -> str:
        self._buffer_of[value] = self._buffers.take(self._ops[value].output, self._widths[value])
        return self._buffer_of[value]

    def _expire(self, index: int) -> None:
        """Give back what no op after `index` reads."""
        for value in [value for value in self._buffer_of if self._last_read(value) <= index]:
            self._buffers.release(self._buffer_of.pop(value))
        for value, form in [key for key in self._prepared if self._last_multiplied(*key) <= index]:
            self._activations.release(self._prepared.pop((value, form)))


def _widths(plan: Plan) -> list[int]:
    """Columns of every value."""
    widths: dict[str, int] = {}
    values = []
    for op in plan.ops:
        widths[op.output] = op.output_width(widths)
        values.append(widths[op.output])
    return values


def _row_op(op: ops.Op, sources: list[str], target: str) -> native.RowOp:
    made: native.RowOp
    match op:
        case ops.Embed():
            made = native.EmbedOp(op.weight, target)
        case ops.Norm():
            made = native.NormOp(_norm(op), sources[0], target)
        case ops.Add():
            made = native.AddOp(sources[0], sources[1], target)
        case ops.Scale():
            made = native.ScaleOp(sources[0], op.factor, target)
        case ops.Activation():
            made = native.ActivateOp(op.function, sources[0], target)
        case ops.Gate():
            made = native.GateOp(op.function, sources[0], sources[1], target)
        case ops.SelectRows():
            made = native.SelectOp(sources[0], target)
        case _:
            raise AssertionError(f"{op.kind} is no work on rows")
    return made


def _norm(op: ops.Norm) -> native.Norm:
    return native.Norm(op.norm, op.weight, op.bias, op.width, op.runs, op.eps)


def _biases(op: ops.Linear) -> tuple[str, ...]:
    return () if op.bias is None else (op.bias,)


def _name(form: native.Activations) -> str:
    groups = f" g{form.group}/{form.dot_group}" if form.group else ""
    return f"{form.code}{groups}{' rotated' if form.rotated else ''} {form.columns}"
