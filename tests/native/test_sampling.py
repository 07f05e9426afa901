"""The native sampler against the one in numpy: the same token, and the same reported numbers, whatever is asked for."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from topg import _native
from topg.backends.native.sampling import NativeStates, native_state, outcome_of
from topg.errors import ComputeError
from topg.sampling import Sampled, SamplerState, sample, uniform
from topg.sampling_params import SamplingParams

ISAS = _native.usable_isas()
TINY = float(np.finfo(np.float32).tiny)

Logits = npt.NDArray[np.float32]


def state(
    vocab: int, prompt: Sequence[int] = (0,), output: Sequence[int] = (), *, seed: int = 0, **params: Any
) -> SamplerState:
    made = SamplerState(SamplingParams(**params), seed, prompt, (), vocab)
    for token in output:
        made.record(token)
    return made


def draw(isa: str, logits: Logits, states: Sequence[SamplerState]) -> list[Sampled | ComputeError]:
    native = NativeStates()
    return [outcome_of(result) for result in _native.sample(isa, logits, [native.of(item) for item in states])]


def assert_same(outcomes: Sequence[Sampled | ComputeError], wanted: Sequence[Sampled | ComputeError]) -> None:
    assert len(outcomes) == len(wanted)
    for one, other in zip(outcomes, wanted, strict=True):
        if isinstance(other, ComputeError):
            assert isinstance(one, ComputeError) and str(one) == str(other)
            continue
        assert isinstance(one, Sampled)
        assert one.token == other.token
        assert [token for token, _ in one.top] == [token for token, _ in other.top]
        assert (one.logprob is None) == (other.logprob is None)
        if one.logprob is not None and other.logprob is not None:
            # Logarithms of different libraries differ in the last bit of numbers up to 750.
            assert one.logprob == pytest.approx(other.logprob, abs=1e-12, rel=1e-14)
            assert dict(one.top) == pytest.approx(dict(other.top), abs=1e-12, rel=1e-14)


@pytest.fixture
def shared_exponentials(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the sampler in numpy use the native exponential: then every bit of a weight agrees, and every draw must."""

    def exponentials(x: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        return _native.sampling_weights("", np.ascontiguousarray(x), 0.0, 1.0)

    monkeypatch.setattr("topg.sampling.sampler.np.exp", exponentials)


# ---- any settings on any logits


def vocabularies() -> st.SearchStrategy[int]:
    return st.one_of(st.integers(1, 9), st.sampled_from([31, 32, 33, 64, 257]), st.integers(10, 2100))


@st.composite
def rows(draw: st.DrawFn, vocab: int) -> Logits:
    """Logits of many shapes: with and without ties, masked entries, unusable numbers."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    scale = draw(st.sampled_from([0.0, 0.3, 1.0, 4.0, 30.0, 1000.0, 1e30]))
    logits = (rng.standard_normal(vocab) * scale).astype(np.float32)
    if draw(st.booleans()):
        logits = np.round(logits)
    masked = draw(st.sampled_from([0.0, 0.0, 0.1, 0.9, 1.0]))
    logits[rng.random(vocab) < masked] = -np.inf
    fault = draw(st.sampled_from([None] * 9 + [np.nan, np.inf]))
    if fault is not None:
        logits[rng.integers(vocab)] = fault
    logits[np.abs(logits) < TINY] = 0  # the native engine knows no denormals
    return logits


@st.composite
def states(draw: st.DrawFn, vocab: int) -> SamplerState:
    tokens = st.integers(0, vocab - 1)
    bias = st.one_of(st.sampled_from([-100.0, 100.0]), st.floats(-100, 100, allow_subnormal=False))
    share = st.floats(0, 1, allow_subnormal=False)
    params = SamplingParams(
        temperature=draw(st.one_of(st.sampled_from([0.0, 1.0]), st.floats(1e-5, 100))),
        top_k=draw(st.one_of(st.sampled_from([-1, 0, 1, vocab]), st.integers(1, vocab + 3))),
        top_p=draw(st.one_of(st.sampled_from([1.0, 1.0, 0.0]), share)),
        min_p=draw(st.one_of(st.sampled_from([0.0, 0.0, 1.0]), share)),
        repetition_penalty=draw(st.one_of(st.just(1.0), st.floats(0.01, 100))),
        presence_penalty=draw(st.one_of(st.just(0.0), st.floats(-2, 2, allow_subnormal=False))),
        frequency_penalty=draw(st.one_of(st.just(0.0), st.floats(-2, 2, allow_subnormal=False))),
        logit_bias=draw(st.one_of(st.just({}), st.dictionaries(tokens, bias, max_size=12))),
        min_tokens=draw(st.integers(0, 3)),
        logprobs=draw(st.one_of(st.none(), st.integers(0, 20))),
    )
    made = SamplerState(
        params,
        draw(st.integers(0, 2**64 - 1)),
        draw(st.lists(tokens, max_size=8)),
        draw(st.lists(tokens, max_size=3)),
        vocab,
    )
    for token in draw(st.lists(tokens, max_size=5)):
        made.record(token)
    return made


@st.composite
def batches(draw: st.DrawFn) -> tuple[Logits, list[SamplerState]]:
    vocab = draw(vocabularies())
    count = draw(st.integers(1, 4))
    return np.stack([draw(rows(vocab)) for _ in range(count)]), [draw(states(vocab)) for _ in range(count)]


fixture_is_harmless = settings(
    max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.usefixtures("shared_exponentials")
@fixture_is_harmless
@given(batch=batches())
def test_agrees_with_numpy(isa: str, batch: tuple[Logits, list[SamplerState]]) -> None:
    logits, of = batch
    assert_same(draw(isa, logits, of), sample(logits, of))


@pytest.mark.parametrize("isa", ISAS)
def test_agrees_with_numpy_on_a_whole_vocabulary(isa: str) -> None:
    """With numpy's own exponential: a draw would have to fall within rounding of a border to differ."""
    vocab = 49_152
    rng = np.random.default_rng(8)
    logits = (rng.standard_normal((12, vocab)) * 4).astype(np.float32)
    params: list[dict[str, Any]] = [
        {}, {"temperature": 0.7}, {"top_k": 50}, {"top_k": 2000}, {"top_p": 0.9}, {"top_p": 0.9999}, {"min_p": 0.05},
        {"top_k": 40, "top_p": 0.95, "min_p": 0.02, "temperature": 0.8}, {"logprobs": 20},
        {"repetition_penalty": 1.3, "frequency_penalty": 0.5}, {"logit_bias": {7: 100, 9: 100}}, {"temperature": 0},
    ]  # fmt: skip
    for turn in range(4):
        of = [
            state(vocab, [1, 5, 5], [int(logits[i].argmax())] * turn, seed=1000 * turn + i, **settings_of)
            for i, settings_of in enumerate(params)
        ]
        assert_same(draw(isa, logits, of), sample(logits, of))


def test_every_instruction_set_gives_the_same_bits() -> None:
    rng = np.random.default_rng(2)
    exponents = np.concatenate([-rng.random(5000) * 720, -rng.random(5003), [0.0, -708.0, -708.5, -math.inf]])
    bits = [_native.sampling_weights(isa, exponents, 0.0, 0.9).view(np.uint64) for isa in ISAS]
    assert all(np.array_equal(bits[0], other) for other in bits)


@pytest.mark.parametrize("isa", ISAS)
def test_weights_are_exponentials_within_one_ulp(isa: str) -> None:
    exponents = -np.concatenate([np.linspace(0, 1, 2003), np.geomspace(1e-9, 708, 20_000)])
    weights = _native.sampling_weights(isa, exponents, 0.0, 1.0)
    exact = np.exp(exponents.astype(np.longdouble))
    assert np.max(np.abs(weights - exact) / np.spacing(exact.astype(np.float64))) < 1
    edges = _native.sampling_weights(isa, np.array([3.0, 3.0 - 708.1, -np.inf, -1e300]), 3.0, 1.0)
    assert edges.tolist() == [1.0, 0.0, 0.0, 0.0]


@settings(deadline=None)
@given(seed=st.integers(0, 2**64 - 1), index=st.integers(0, 2**40))
def test_random_numbers_are_those_of_python(seed: int, index: int) -> None:
    assert _native.uniform(seed, index) == uniform(seed, index)


# ---- cases of their own


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("vocab", [1, 2, 31, 32, 33, 1000])
@pytest.mark.parametrize(
    "params", [{}, {"top_k": 3}, {"top_p": 0.5}, {"top_k": 40, "top_p": 0.3}, {"temperature": 0}], ids=str
)
def test_equal_logits_rank_by_id(isa: str, vocab: int, params: dict[str, Any]) -> None:
    logits = np.zeros((30, vocab), np.float32)
    of = [state(vocab, seed=seed, logprobs=5, **params) for seed in range(30)]
    outcomes = draw(isa, logits, of)
    assert_same(outcomes, sample(logits, of))
    for outcome in outcomes:
        assert isinstance(outcome, Sampled)
        assert [token for token, _ in outcome.top] == list(range(min(5, vocab)))


@pytest.mark.parametrize("isa", ISAS)
def test_rows_do_not_see_each_other(isa: str) -> None:
    vocab = 700
    rng = np.random.default_rng(4)
    logits = rng.standard_normal((7, vocab)).astype(np.float32)
    logits[3, 600] = np.nan
    params: list[dict[str, Any]] = [
        {"temperature": 0}, {"top_k": 9}, {"top_p": 0.2}, {}, {"logprobs": 4}, {"logit_bias": {3: -100}},
        {"min_p": 0.5},
    ]  # fmt: skip
    of = [state(vocab, [i], [i, i], seed=i, **settings_of) for i, settings_of in enumerate(params)]
    alone = [draw(isa, logits[i : i + 1], [of[i]])[0] for i in range(7)]
    order = rng.permutation(7)
    together = draw(isa, logits[order], [of[i] for i in order])
    assert isinstance(alone[3], ComputeError)
    assert [str(outcome) for outcome in together] == [str(alone[i]) for i in order]


@pytest.mark.parametrize("isa", ISAS)
def test_tokens_recorded_between_steps_count(isa: str) -> None:
    vocab = 100
    logits = np.random.default_rng(5).standard_normal((1, vocab)).astype(np.float32)
    sequence = state(
        vocab, [3, 4], seed=6, repetition_penalty=1.5, presence_penalty=0.5, frequency_penalty=0.3, logprobs=3
    )
    native = NativeStates()
    for _ in range(50):
        outcome = outcome_of(_native.sample(isa, logits, [native.of(sequence)])[0])
        assert_same([outcome], sample(logits, [sequence]))
        assert isinstance(outcome, Sampled)
        sequence.record(outcome.token)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("params", [{}, {"temperature": 0}, {"top_k": 5, "logprobs": 4}], ids=str)
def test_a_mask_allows_what_a_bias_of_100_allows(isa: str, params: dict[str, Any]) -> None:
    vocab, allowed = 75, [2, 31, 32, 33, 64, 74]
    logits = np.random.default_rng(6).standard_normal((1, vocab)).astype(np.float32)
    bits = np.zeros((vocab + 31) // 32 * 32, np.uint8)
    bits[allowed] = 1
    words = np.packbits(bits, bitorder="little").view(np.uint32)
    for seed in range(20):
        masked = native_state(state(vocab, seed=seed, **params))
        masked.allow(words)
        biased = native_state(state(vocab, seed=seed, logit_bias=dict.fromkeys(allowed, 100), **params))
        free = native_state(state(vocab, seed=seed, **params))
        results = _native.sample(isa, np.repeat(logits, 3, 0), [masked, biased, free])
        assert results[0] == results[1]
        masked.allow_all()
        assert _native.sample(isa, logits, [masked])[0] == results[2]


def test_what_does_not_fit_is_refused() -> None:
    logits = np.zeros((2, 8), np.float32)
    good = native_state(state(8))
    with pytest.raises(ValueError, match="1 states were given for 2 rows"):
        _native.sample("", logits, [good])
    with pytest.raises(ValueError, match="model's vocabulary, 8 tokens"):
        _native.sample("", logits, [good, native_state(state(9))])
    with pytest.raises(ValueError, match="states must be SamplerState objects"):
        _native.sample("", logits, [good, None])  # type: ignore[list-item]
    with pytest.raises(ValueError, match=r"token id 8 .* allowed: 0 to 7"):
        good.record(8)
    with pytest.raises(ValueError, match="token id -1 "):
        native_state(state(8, [-1], repetition_penalty=2.0))
    with pytest.raises(ValueError, match="have 2 words"):
        good.allow(np.zeros(2, np.uint32))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("repetition_penalty", 1e-300),
        ("repetition_penalty", 1e300),
        ("presence_penalty", 1.7e308),
        ("frequency_penalty", -1.7e308),
        ("biases", [(0, 1.7e308)]),
    ],
)
def test_settings_that_make_infinities_are_refused(name: str, value: object) -> None:
    """A banned token's minus infinity and such a penalty's are NaN, which the search for the best would run past."""
    settings: dict[str, Any] = {
        "vocab": 2, "prompt": np.array([0], np.int32), "seed": 1, "greedy": True, "temperature": 1.0, "top_k": 0,
        "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0,
        "biases": [], "banned": [0, 1], "exclusive": [], "end_tokens": [], "min_tokens": 0, "logprobs": -1,
    }  # fmt: skip
    _native.SamplerState(**settings)
    with pytest.raises(ValueError, match="allowed"):
        _native.SamplerState(**settings | {name: value})
