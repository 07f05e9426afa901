"""Drawing inside a step of the native engine: the tokens that the sampler in numpy draws from the step's logits."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from typing import Any

import pytest

from support.memory_model import random_model
from topg import _native
from topg.backends import SequenceSlice, Step
from topg.backends.native import NativeBackend
from topg.backends.native.sampling import NativeStates
from topg.sampling import Sampled, SamplerState, sample
from topg.sampling_params import SamplingParams

VOCAB = 99
SETTINGS: Sequence[dict[str, Any]] = (
    {}, {"temperature": 0}, {"top_k": 9, "logprobs": 3}, {"top_p": 0.4}, {"min_p": 0.2, "logprobs": 0},
    {"repetition_penalty": 1.4, "frequency_penalty": 0.3}, {"logit_bias": {4: 100, 8: 100}}, {"temperature": 2.5},
)  # fmt: skip


def load(isa: str, threads: int) -> NativeBackend:
    return NativeBackend(random_model("int8"), page_count=20, tokens_per_page=32, isa=isa, threads=threads)


def states() -> list[SamplerState]:
    return [SamplerState(SamplingParams(**settings), seed, [1, 2], [], VOCAB) for seed, settings in enumerate(SETTINGS)]


@pytest.mark.parametrize("isa", _native.usable_isas())
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_a_sequence_of_steps_draws_what_numpy_draws(isa: str, threads: int) -> None:
    backend, running = load(isa, threads), states()
    tokens = [5] * len(running)
    for position in range(12):
        slices = [SequenceSlice([token], position, [page]) for page, token in enumerate(tokens)]
        outcomes = backend.run_and_sample(Step(tuple(slices)), running)
        wanted = sample(backend.run(Step(tuple(slices))), running)
        for state, one, other in zip(running, outcomes, wanted, strict=True):
            assert isinstance(one, Sampled) and isinstance(other, Sampled)
            assert one.token == other.token
            assert [token for token, _ in one.top] == [token for token, _ in other.top]
            state.record(one.token)
        tokens = [state.output[-1] for state in running]
    assert len(set(tokens)) > 2


def test_rows_without_a_draw_lie_between_rows_with_one() -> None:
    backend, running = load("", 2), states()[:3]
    slices = (
        SequenceSlice([1] * 40, 0, [0, 1], "none"),
        SequenceSlice([2, 3], 0, [2], "all"),
        SequenceSlice([4] * 3, 0, [3], "none"),
        SequenceSlice([5] * 90, 0, [4, 5, 6], "last"),
    )
    step = Step(slices)
    outcomes = backend.run_and_sample(step, running)
    assert [one.token for one in outcomes if isinstance(one, Sampled)] == [
        other.token for other in sample(backend.run(step), running) if isinstance(other, Sampled)
    ]
    assert len(outcomes) == 3


def test_a_native_state_goes_with_its_state() -> None:
    native = NativeStates()
    state = states()[0]
    first = native.of(state)
    state.record(7)
    assert native.of(state) is first and first.generated == 1
    assert len(native) == 1
    del state
    gc.collect()
    assert len(native) == 0
