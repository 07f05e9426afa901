"""The native engine on small programs: right, the same bits however a step is cut, and closed to nonsense."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import get_args

import numpy as np
import numpy.typing as npt
import pytest

from support.forks import in_a_fork
from support.native_program import Form, Request, Shape, TinyModel, arrays, run
from topg import _native
from topg.precision.formats import BFLOAT16, FLOAT32, INT8_PLAIN, INT8_ROTATED, Precision

Bits = npt.NDArray[np.int32]

TOKENS = np.random.default_rng(5).integers(0, 100, 300).tolist()
PAGES = [7, 2, 11, 4, 9]  # room for 320 tokens
OTHER = [0, 1, 3, 5, 6, 8]

ISAS = pytest.mark.parametrize("isa", _native.usable_isas())
FORMS = pytest.mark.parametrize("form", get_args(Form))


def _bits(logits: npt.NDArray[np.float32]) -> Bits:
    return logits.view(np.int32)


def _in_chunks(engine: _native.Engine, count: int, size: int) -> Bits:
    chunks = [
        run(engine, Request(TOKENS[start : min(start + size, count)], start, PAGES)) for start in range(0, count, size)
    ]
    return _bits(np.concatenate(chunks))


# ---- right ----------------------------------------------------------------------------------------------------------


@ISAS
@FORMS
@pytest.mark.parametrize(
    "shape",
    [Shape(), Shape(window=40), Shape(softcap=2.0), Shape(heads=2, kv_heads=2), Shape(heads=8, kv_heads=1)],
    ids=["plain", "window", "softcap", "one head a KV head", "one KV head"],
)
def test_logits_agree_with_float64(isa: str, form: Form, shape: Shape) -> None:
    model = TinyModel(FLOAT32, shape, form)
    logits = run(model.engine(isa), Request(TOKENS[:150], 0, PAGES))
    np.testing.assert_allclose(logits, model.logits(TOKENS[:150]), rtol=0, atol=2e-4)


@ISAS
@pytest.mark.parametrize("head_dim", [8, 24, 40])
def test_heads_of_any_size(isa: str, head_dim: int) -> None:
    model = TinyModel(FLOAT32, Shape(head_dim=head_dim), form="plain")
    logits = run(model.engine(isa), Request(TOKENS[:70], 0, PAGES))
    np.testing.assert_allclose(logits, model.logits(TOKENS[:70]), rtol=0, atol=2e-4)


@ISAS
@pytest.mark.parametrize("precision", [BFLOAT16, INT8_PLAIN, INT8_ROTATED], ids=Precision.describe)
@pytest.mark.parametrize("kv", ["float32", "bfloat16", "int8"])
def test_rounded_formats_are_close_to_float64(isa: str, precision: Precision, kv: str) -> None:
    model = TinyModel(precision)
    logits = run(model.engine(isa, kv=kv), Request(TOKENS[:100], 0, PAGES))
    exact = model.logits(TOKENS[:100])
    error = np.linalg.norm(logits - exact) / np.linalg.norm(exact)
    assert error < 0.03


def test_only_wanted_rows_come_back() -> None:
    engine = TinyModel().engine(threads=2)
    everything = run(engine, Request(TOKENS[:20], 0, PAGES))
    wanted = run(
        engine, Request(TOKENS[:20], 0, PAGES, 1), Request(TOKENS[:9], 0, OTHER, 0), Request(TOKENS[:3], 0, [20], 2)
    )
    assert wanted.shape == (4, 100)
    np.testing.assert_array_equal(_bits(wanted), _bits(everything[[19, 0, 1, 2]]))
    assert run(engine, Request(TOKENS[:4], 0, PAGES, 0)).shape == (0, 100)


@ISAS
def test_greedy_is_the_best_logit(isa: str) -> None:
    engine = TinyModel().engine(isa, threads=3)
    request = Request(TOKENS[:130], 0, PAGES)
    np.testing.assert_array_equal(engine.greedy(*arrays(request)), run(engine, request).argmax(axis=1))


def test_greedy_reports_what_is_no_number() -> None:
    model = TinyModel()
    model.norm[20] = np.nan
    assert model.engine(threads=2).greedy(*arrays(Request([1, 13, 2], 0, PAGES))).tolist() == [-1, -1, -1]


def test_pages_can_be_copied() -> None:
    engine = TinyModel().engine()
    expected = run(engine, Request(TOKENS[:70], 0, PAGES), Request(TOKENS[70:75], 0, [12]))[65:70]
    for source, target in zip(PAGES[:2], (20, 21), strict=True):
        engine.copy_page(source, target)
    np.testing.assert_array_equal(_bits(run(engine, Request(TOKENS[65:70], 65, [20, 21]))), _bits(expected))


# ---- the same bits --------------------------------------------------------------------------------------------------


@ISAS
@FORMS
@pytest.mark.parametrize("precision", [FLOAT32, BFLOAT16, INT8_ROTATED], ids=Precision.describe)
def test_chunks_threads_and_modes_change_no_bit(isa: str, form: Form, precision: Precision) -> None:
    """Steps of 64 rows and 32 a thread go by rows, smaller ones by channels; with few items key blocks are kept."""
    model = TinyModel(precision, form=form)
    expected = _in_chunks(model.engine(isa, threads=1, kv="bfloat16"), 290, 145)
    for threads, size in ((1, 63), (2, 64), (3, 37), (2, 5), (2, 145), (5, 145), (5, 16), (3, 1)):
        engine = model.engine(isa, threads=threads, kv="bfloat16")
        np.testing.assert_array_equal(_in_chunks(engine, 290, size), expected, f"{threads} threads, chunks of {size}")


@ISAS
@pytest.mark.parametrize("kv", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("window", [0, 100])
def test_a_row_does_not_depend_on_its_step(isa: str, kv: str, window: int) -> None:
    model = TinyModel(FLOAT32, Shape(window=window))
    expected = _in_chunks(model.engine(isa, kv=kv), 290, 290 // 2)[280:]
    engine = model.engine(isa, threads=2, kv=kv)
    run(engine, Request(TOKENS[:250], 0, PAGES, 0))
    run(engine, Request(TOKENS[250:280], 250, PAGES, 0), Request(TOKENS[9:90], 0, OTHER, 0))
    decoded = [run(engine, Request([TOKENS[280]], 280, PAGES))]
    decoded += [run(engine, Request(TOKENS[281:284], 281, PAGES), Request([3], 81, OTHER, 0))]
    decoded += [run(engine, *(Request([8], 0, [20 + i], 0) for i in range(9)), Request([TOKENS[284]], 284, PAGES))]
    decoded += [run(engine, Request(TOKENS[100:180], 0, [12, 13], 0), Request(TOKENS[285:290], 285, PAGES))]
    np.testing.assert_array_equal(_bits(np.concatenate(decoded)), expected)


def test_what_a_page_held_before_does_not_leak() -> None:
    model = TinyModel(FLOAT32)
    clean = run(model.engine(kv="int8"), Request(TOKENS[:37], 0, [3]))
    engine = model.engine(kv="int8")
    run(engine, Request(TOKENS[200:264], 0, [3], 0))
    np.testing.assert_array_equal(_bits(run(engine, Request(TOKENS[:37], 0, [3]))), _bits(clean))


def test_callers_in_several_threads_wait_for_each_other() -> None:
    model = TinyModel(INT8_ROTATED)
    engine = model.engine(threads=2)
    expected = run(engine, Request(TOKENS[:100], 0, PAGES))
    results: list[npt.NDArray[np.float32]] = []

    def call(pages: list[int]) -> None:
        results.extend(run(engine, Request(TOKENS[:100], 0, pages)) for _ in range(5))

    callers = [threading.Thread(target=call, args=([first, first + 1],)) for first in (20, 24, 28)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert len(results) == 15
    for result in results:
        np.testing.assert_array_equal(_bits(result), _bits(expected))


@FORMS
@pytest.mark.parametrize("threads", [2, 4])
def test_a_long_step_is_right_after_a_short_one(form: Form, threads: int) -> None:
    """A short step's private copies of activations are nobody's input in the next step."""
    model = TinyModel(form=form)
    expected = _bits(run(model.engine(), Request(TOKENS[:200], 0, PAGES)))
    engine = model.engine(threads=threads)
    for _ in range(100):
        run(engine, Request(TOKENS[:1], 0, OTHER))
        np.testing.assert_array_equal(_bits(run(engine, Request(TOKENS[:200], 0, PAGES))), expected)


def test_weights_may_be_added_by_several_threads() -> None:
    engine = _building()
    values = np.zeros((64, 64), np.float32)

    def add() -> None:
        for _ in range(100):
            engine.add_weight("float32", "float32", "none", 0, False, False, 64, 64, [(values, None, None)])

    threads = [threading.Thread(target=add) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert engine.weight_bytes == 401 * values.nbytes


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_fork_during_a_step_does_not_wait_for_it() -> None:
    """The lock of the step that the parent is in stays locked in the child."""
    engine = TinyModel().engine(threads=2)
    stop = threading.Event()

    def step_all_the_time() -> None:
        while not stop.is_set():
            run(engine, Request(TOKENS[:200], 0, PAGES, 1))

    def is_refused() -> bool:
        for call in (lambda: engine.copy_page(0, 1), engine.profile, lambda: run(engine, Request([1], 0, PAGES))):
            with pytest.raises(RuntimeError, match="forked"):
                call()
        return True

    thread = threading.Thread(target=step_all_the_time)
    thread.start()
    try:
        assert all(in_a_fork(is_refused) for _ in range(5))
    finally:
        stop.set()
        thread.join()


def test_denormals_are_the_callers_business() -> None:
    tiny = np.array([1e-40], np.float32)
    run(TinyModel().engine(threads=2), Request(TOKENS[:5], 0, PAGES))
    assert (tiny * np.float32(0.5) != 0).all()


def test_a_profile_names_every_step() -> None:
    engine = TinyModel().engine(threads=2)
    assert engine.profile() == {"steps": [], "waiting": 0.0}
    engine.set_profiling(True)
    run(engine, Request(TOKENS[:70], 0, PAGES))
    run(engine, Request(TOKENS[70:72], 70, PAGES))
    profile = engine.profile()
    assert len(profile["steps"]) == 16  # embed, layers of 7 and 6, select, logits
    assert all(seconds > 0 for seconds in profile["steps"])
    assert profile["waiting"] > 0
    engine.set_profiling(False)
    assert engine.profile()["steps"] == []


# ---- closed to nonsense ---------------------------------------------------------------------------------------------

STEP = arrays(Request([1, 2, 3], 0, [0], 1), Request([4], 64, [1, 2], 1))


@pytest.mark.parametrize(
    ("position", "changed", "message"),
    [
        (0, [1, 2, 3, 100], "token id 100 does not exist; the model has ids 0 to 99"),
        (0, [1, -2, 3, 4], "token id -2"),
        (0, [1, 2, 3], "slice 1 has 1 tokens"),
        (0, [1, 2, 3, 4, 5], "4 tokens together; 5 were given"),
        (0, [1] * 257, "at most 256"),
        (1, [0], "as many starts"),
        (1, [0, -1], "positions -1"),
        (1, [0, 2047 + 1], "positions 2048 to 2048"),
        (1, [2**31 - 1, 0], "positions 0 to 2047"),
        (2, [4, 0], "slice 1 has 0 tokens"),
        (2, [-1, 5], "slice 0 has -1 tokens"),
        (2, [], "no slices"),
        (3, [0, 1], "page offset"),
        (3, [0, 2, 1], "slice 1 has pages 2 to 1 of 3"),
        (3, [-1, 1, 3], "slice 0 has pages -1"),
        (3, [0, 1, 4], "to 4 of 3"),
        (3, [0, 1, 2], "room for 64 of 65 tokens"),
        (4, [0, 1, 40], "names page 40; the pool has pages 0 to 39"),
        (4, [0, -1, 2], "names page -1"),
        (5, [1, 3], "wants logits 3"),
        (5, [1], "as many starts and wanted"),
    ],
)
def test_steps_that_lead_outside_are_refused(position: int, changed: list[int], message: str) -> None:
    engine = TinyModel().engine()
    expected = engine.run(*STEP)
    step = [*STEP[:position], np.array(changed, STEP[position].dtype), *STEP[position + 1 :]]
    for call in (engine.run, engine.greedy):
        with pytest.raises(ValueError, match=message):
            call(*step)
    np.testing.assert_array_equal(engine.run(*STEP), expected)  # and nothing happened


def test_positions_without_angles_are_refused() -> None:
    model = TinyModel()
    engine = model.engine()
    engine.set_rope(0, model.cos[:50], model.sin[:50])
    with pytest.raises(ValueError, match=r"position 50 has no angles; the rope table ends before position 50"):
        run(engine, Request([1], 50, PAGES))
    engine.set_rope(0, model.cos, model.sin)
    run(engine, Request([1], 50, PAGES))


def test_pages_that_do_not_exist_are_not_copied() -> None:
    engine = TinyModel().engine()
    for source, target in ((0, 40), (-1, 0)):
        with pytest.raises(ValueError, match="pages 0 to 39"):
            engine.copy_page(source, target)


def _building() -> _native.Engine:
    """An engine with something in every table: buffer 0 of 64 columns, activations 0 and weight 0 of 64, vector 0."""
    engine = _native.Engine("", 1, 8, 8, 128)
    engine.set_cache("float32", 1, 2, 32, 32, 2)
    engine.add_buffer(64)
    engine.add_activations("float32", 0, 0, False, 64)
    engine.add_weight(
        "float32", "float32", "none", 0, False, False, 64, 64, [(np.zeros((64, 64), np.float32), None, None)]
    )
    engine.add_vector(np.zeros(64, np.float32))
    engine.add_rope(16)
    engine.add_attention(0, 4, 1.0, 0.0, 0, 0)
    return engine


def _part(weight: int = 0, bias: int = -1, epilogue: str = "store", buffer: int = 0, activations: int = -1):
    return _native.LinearPart(weight, bias, epilogue, "silu", buffer, activations)


def _norm(width: int = 64, weight: int = 0, runs: int = 1) -> _native.Norm:
    return _native.Norm("rms", weight, -1, width, runs, 1e-5)


_op = _native.RowOp
_Bad = Callable[[_native.Engine], object]

BAD: list[tuple[_Bad, str]] = [
    (lambda e: e.add_buffer(0), "width of a buffer"),
    (lambda e: e.add_activations("int8", 48, 16, False, 64), "groups of 48"),
    (lambda e: e.add_activations("int8", 64, 8, False, 64), "dot group of 8"),
    (lambda e: e.add_activations("float32", 64, 64, False, 64), "without scales"),
    (lambda e: e.add_activations("int9", 64, 64, False, 64), "int9"),
    (lambda e: e.add_attention(1, 4, 1.0, 0.0, 0, 0), "layer"),
    (lambda e: e.add_attention(0, 3, 1.0, 0.0, 0, 0), "3 query heads"),
    (lambda e: e.add_attention(0, 4, 1.0, 0.0, 0, 1), "rope table"),
    (lambda e: e.add_attention(0, 4, 1.0, 0.0, -1, 0), "window"),
    (lambda e: e.set_rope(1, np.zeros((1, 16), np.float32), np.zeros((1, 16), np.float32)), "rope table"),
    (lambda e: e.set_rope(0, np.zeros((1, 8), np.float32), np.zeros((1, 8), np.float32)), "width of a rope table"),
    (lambda e: e.set_rope(0, np.zeros((2, 16), np.float32), np.zeros((1, 16), np.float32)), "same shape"),
    (lambda e: e.set_cache("float32", 1, 2, 32, 33, 2), "multiple of 32"),
    (lambda e: e.set_cache("float32", 1, 2, 32, 32, 0), "pages 0"),
    (lambda e: e.set_cache("float32", 1, 2, 0, 32, 2), "head_dim 0"),
    (lambda e: e.set_cache("float32", 1, 2, 32, 32, 2), "before attentions"),
    (lambda e: e.set_cache("float32", 1 << 16, 1 << 16, 512, 1 << 20, 2), "larger than any memory"),
    (lambda e: e.add_row_step([_op.embed(1, 0)]), "weight 1"),
    (lambda e: e.add_row_step([_op.embed(0, 1)]), "buffer 1"),
    (lambda e: e.add_row_step([_op.norm(_norm(64, -1, runs=2), 0, 0)]), "must be 128"),
    (lambda e: e.add_row_step([_op.norm(_norm(64, 1), 0, 0)]), "vector 1"),
    (lambda e: e.add_row_step([_op.norm(_norm(64, runs=2), -2, -2)]), "scratch row"),
    (lambda e: e.add_row_step([_op.norm(_norm(0), 0, 0)]), "a norm of"),
    (lambda e: e.add_row_step([_op.add(0, 0, -2)]), "buffer -2"),
    (lambda e: e.add_row_step([_op.select(-2, 0)]), "buffer -2"),
    (lambda e: e.add_row_step([_op.prepare(0, 1)]), "activations 1"),
    (lambda e: e.add_row_step([_op.activate("swish", 0, 0)]), "swish"),
    (lambda e: e.add_row_step([_op.heads(_native.Heads(0, 0, 0, 0, _norm(), _norm()))]), "buffer 0 is 64 wide"),
    (lambda e: e.add_row_step([_op.heads(_native.Heads(0, -2, 0, 0, _norm(), _norm()))]), "buffer -2"),
    (lambda e: e.add_linear_step(1, [_part()], None), "activations 1"),
    (lambda e: e.add_linear_step(0, [], None), "no parts"),
    (lambda e: e.add_linear_step(0, [_part(weight=7)], None), "weight 7"),
    (lambda e: e.add_linear_step(0, [_part(buffer=-2)], None), "buffer -2"),
    (lambda e: e.add_linear_step(0, [_part(buffer=-1)], None), "not both"),
    (lambda e: e.add_linear_step(0, [_part(activations=0)], None), "not both"),
    (lambda e: e.add_linear_step(0, [_part(buffer=-1, activations=0)], None), "only activated"),
    (lambda e: e.add_linear_step(0, [_part(bias=3)], None), "vector 3"),
    (lambda e: e.add_linear_step(0, [_part(epilogue="gate")], None), "32 results"),
    (lambda e: e.add_attention_step(0, -2, -1), "buffer -2"),
    (lambda e: e.add_attention_step(0, 0, -1), "must be 128"),
    (lambda e: e.add_attention_step(1, 0, -1), "attention 1"),
    (lambda e: e.add_logits_step(0, 1, 0.0), "weight 1"),
    (lambda e: e.finish(), "must end in a logits step"),
    (lambda e: e.add_vector(np.zeros((2, 2), np.float32)), "incompatible"),
    (lambda e: e.copy_page(0, 1), "not finished"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "message"), BAD, ids=[message for _, message in BAD])
def test_nonsense_is_refused(call: _Bad, message: str) -> None:
    with pytest.raises((ValueError, TypeError, RuntimeError), match=message):
        call(_building())


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ((np.zeros((64, 63), np.float32), None, None), r"\[64, 64\]"),
        ((np.zeros((64, 64), np.float16), None, None), "4 bytes"),
        ((np.zeros((64, 128), np.float32)[:, ::2], None, None), "C-contiguous"),
        ((np.zeros((64, 64), np.float32), np.zeros((64, 1), np.float32), None), "scales were given"),
        ((None, None, None), "C-contiguous"),
    ],
)
def test_weights_that_are_not_what_they_should_be(parts: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        _building().add_weight("float32", "float32", "none", 0, False, False, 64, 64, [parts])  # type: ignore[list-item]


def test_activations_must_be_filled_up_as_the_weight_is() -> None:
    engine = _native.Engine("", 1, 8, 8, 128)
    engine.set_cache("float32", 1, 2, 32, 32, 2)
    codes, scales = np.zeros((32, 96), np.int8), np.zeros((32, 3), np.uint16)
    weight = engine.add_weight("int8", "int8", "bfloat16", 32, False, False, 32, 96, [(codes, scales, None)])
    wide = engine.add_activations("int8", 64, 64, False, 96)
    buffer = engine.add_buffer(32)
    with pytest.raises(ValueError, match="not in the form that weight 0 is multiplied with"):
        engine.add_linear_step(wide, [_part(weight, buffer=buffer)], None)


def test_nothing_is_added_to_a_finished_engine() -> None:
    engine = TinyModel().engine()
    with pytest.raises(RuntimeError, match="finished"):
        engine.add_buffer(64)


@pytest.mark.parametrize("sizes", [(-1, 1, 32, 32), (1, 1, 0, 32), (1, 1, 32, 40), (1 << 16, 1 << 16, 512, 1 << 20)])
def test_pages_that_make_no_sense_have_no_size(sizes: tuple[int, int, int, int]) -> None:
    with pytest.raises(ValueError, match=r"page|cache"):
        _native.page_bytes("float32", *sizes)


def test_nothing_follows_a_logits_step() -> None:
    """Its logits would be written over results that are as wide as the last step's."""
    engine = _building()
    engine.add_logits_step(0, 0, 0.0)
    with pytest.raises(ValueError, match="no step can follow"):
        engine.add_logits_step(0, 0, 0.0)


def test_rows_needed_after_they_were_left_out() -> None:
    engine = _building()
    engine.add_row_step([_op.select(0, 0)])
    engine.add_row_step([_op.embed(0, 0), _op.prepare(0, 0)])
    engine.add_logits_step(0, 0, 0.0)
    with pytest.raises(ValueError, match="step 1 needs all rows"):
        engine.finish()
