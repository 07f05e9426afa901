"""What every back end promises: which rows come back, and which steps are refused before anything is written."""

from __future__ import annotations

import numpy as np
import pytest

from support.memory_model import MemoryModel, random_model
from support.stepping import run_chunks
from topg.backends import Backend, SequenceSlice, Step, load_backend
from topg.errors import ComputeError, RequestError
from topg.kv.pages import KVGeometry, PageAccountingError
from topg.sampling import Sampled, SamplerState
from topg.sampling_params import SamplingParams


@pytest.fixture(scope="module")
def model() -> MemoryModel:
    return random_model("float32")


@pytest.fixture(scope="module", params=["native", "torch"])
def backend(model: MemoryModel, request: pytest.FixtureRequest) -> Backend:
    if request.param == "torch":
        pytest.importorskip("torch")
    return load_backend(model, request.param, page_count=8, tokens_per_page=32, kv_dtype="float32")


def test_geometry_and_plan(backend: Backend, model: MemoryModel) -> None:
    assert backend.kv == KVGeometry(layers=2, kv_heads=2, head_dim=16, dtype="float32", tokens_per_page=32)
    assert backend.plan is model.plan


def test_rows_come_back_in_the_order_of_slices_and_tokens(backend: Backend) -> None:
    first, second, third = [1, 2, 3], [4, 5], [6, 7, 8, 9]
    everything = [run_chunks(backend, tokens, [0], len(tokens)) for tokens in (first, second, third)]
    wanted = (SequenceSlice(first, 0, [3]), SequenceSlice(second, 0, [1], "none"), SequenceSlice(third, 0, [2], "all"))
    step = Step(wanted)
    expected = np.concatenate((everything[0][-1:], everything[2]))
    np.testing.assert_array_equal(backend.run(step), expected)


def test_a_step_may_want_no_logits(backend: Backend) -> None:
    assert backend.run(Step((SequenceSlice([1, 2], 0, [0], "none"),))).shape == (0, 99)


def test_the_result_stays_valid(backend: Backend) -> None:
    step = Step((SequenceSlice([1, 2], 0, [0]),))
    logits = backend.run(step)
    kept = logits.copy()
    backend.run(Step((SequenceSlice([50, 51], 0, [0]),)))
    np.testing.assert_array_equal(logits, kept)
    assert logits.dtype == np.float32


def test_a_copied_page_holds_the_same_tokens(backend: Backend) -> None:
    tokens = list(range(40))
    expected = run_chunks(backend, tokens, [0, 1], 40)[-1:]
    backend.copy_page(1, 5)
    run_chunks(backend, [9] * 32, [1], 32)
    np.testing.assert_array_equal(backend.run(Step((SequenceSlice([39], 39, [0, 5]),))), expected)
    with pytest.raises(PageAccountingError, match="page 8 cannot be copied; the pool has 8 pages"):
        backend.copy_page(1, 8)


@pytest.mark.parametrize(
    ("slices", "message"),
    [
        ([], "no slices"),
        ([SequenceSlice([], 0, [0])], "0 tokens from position 0"),
        ([SequenceSlice([1], -1, [0])], "1 tokens from position -1"),
        ([SequenceSlice([1, 99], 0, [0])], "token id 99 does not exist; the model has ids 0 to 98"),
        ([SequenceSlice([-1], 0, [0])], "token id -1 does not exist"),
        ([SequenceSlice([1], 0, [0], "first")], "'first'; allowed: none, last, all"),  # type: ignore[arg-type]
    ],
)
def test_bad_tokens_are_refused(backend: Backend, slices: list[SequenceSlice], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        backend.run(Step(tuple(slices)))


@pytest.mark.parametrize(
    ("slices", "message"),
    [
        ([SequenceSlice([1, 2], 31, [0])], "1 pages has room for 32 of 33 tokens"),
        ([SequenceSlice([1], 0, [8])], "page 8; the pool has pages 0 to 7"),
        ([SequenceSlice([1], 0, [-1])], "page -1"),
        ([SequenceSlice([1], 0, [3]), SequenceSlice([1], 0, [3])], "page 3 is written"),
        ([SequenceSlice([1], 40, [2, 3]), SequenceSlice([1], 64, [2, 3, 4])], "page 3 is written"),
        ([SequenceSlice([1] * 40, 0, [6, 6])], "page 6 is written"),
    ],
)
def test_bad_page_tables_are_refused(backend: Backend, slices: list[SequenceSlice], message: str) -> None:
    with pytest.raises(PageAccountingError, match=message):
        backend.run(Step(tuple(slices)))


def test_sequences_may_read_a_shared_page(backend: Backend) -> None:
    tokens = list(range(33))
    expected = run_chunks(backend, tokens, [0, 1], 33)[-1]
    logits = backend.run(Step((SequenceSlice([32], 32, [0, 1]), SequenceSlice([32], 32, [0, 2]))))
    np.testing.assert_array_equal(logits, np.stack((expected, expected)))


def test_drawing_is_running_and_drawing(backend: Backend) -> None:
    params = SamplingParams(temperature=0)
    states = [SamplerState(params, 0, [1], [], 99), SamplerState(params, 0, [1], [7], 99)]
    step = Step((SequenceSlice([1, 2], 0, [3]), SequenceSlice([4], 0, [1], "none"), SequenceSlice([5], 0, [2])))
    assert backend.run_and_sample(step, states) == [Sampled(int(row.argmax())) for row in backend.run(step)]


def test_states_must_belong_to_the_rows(backend: Backend) -> None:
    step = Step((SequenceSlice([1, 2], 0, [3]),))
    with pytest.raises((ComputeError, ValueError)):
        backend.run_and_sample(step, [])
