"""The sampler: exact arithmetic, exact truncation, the right distribution, and rows that do not see each other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from topg.errors import ComputeError
from topg.sampling import Sampled, SamplerState, sample
from topg.sampling_params import SamplingParams

VOCAB = 12
LOGITS = np.array([0.5, 2.0, -1.0, 1.5, 0.0, -3.0, 2.0, 1.0, -0.5, 0.25, -2.0, 1.25], np.float32)


def state(
    prompt: Sequence[int] = (0,), generated: Sequence[int] = (), *, seed: int = 0, end_tokens: Sequence[int] = (),
    vocab: int = VOCAB, **params: Any,
) -> SamplerState:  # fmt: skip
    made = SamplerState(SamplingParams(**params), seed, prompt, end_tokens, vocab)
    for token in generated:
        made.record(token)
    return made


def one(logits: npt.NDArray[np.float32], of: SamplerState) -> Sampled:
    (outcome,) = sample(logits[None], [of])
    assert isinstance(outcome, Sampled), outcome
    return outcome


def logprobs(of: SamplerState, logits: npt.NDArray[np.float32] = LOGITS) -> dict[int, float]:
    return dict(one(logits, of).top)


def draws(count: int, logits: npt.NDArray[np.float32] = LOGITS, **params: Any) -> list[int]:
    return [one(logits, state(seed=seed, **params)).token for seed in range(count)]


def softmax(logits: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    weights = np.exp(logits.astype(np.float64) - logits.max())
    return np.asarray(weights / weights.sum())


# ---- greedy and its limits


def test_greedy_takes_the_lowest_id_among_equals() -> None:
    assert one(LOGITS, state(temperature=0)).token == 1
    assert one(np.zeros(VOCAB, np.float32), state(temperature=0)).token == 0


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 1e-8}, {"top_k": 1}, {"top_p": 0}, {"top_p": 1e-9}, {"min_p": 1},
        {"temperature": 1e-4}, {"temperature": 100, "top_k": 1},
    ],
    ids=str,
)  # fmt: skip
def test_extremes_behave_like_their_limit(params: dict[str, Any]) -> None:
    distinct = LOGITS.copy()
    distinct[6] = 1.9
    assert set(draws(50, distinct, **params)) == {1}


@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30, 3e37])
@pytest.mark.parametrize("temperature", [0, 1.1e-5, 1, 100])
def test_large_and_small_logits_stay_numbers(scale: float, temperature: float) -> None:
    outcome = one(LOGITS * np.float32(scale), state(temperature=temperature, logprobs=3))
    assert 0 <= outcome.token < VOCAB
    assert outcome.logprob is not None and not np.isnan(outcome.logprob)


@pytest.mark.parametrize("params", [{"top_k": VOCAB}, {"top_k": 10 * VOCAB}, {"top_k": 0}, {"top_k": -1}, {"top_p": 1}])
def test_settings_that_keep_all_change_no_draw(params: dict[str, Any]) -> None:
    assert draws(200, **params) == draws(200)


# ---- the distribution


def chi_squared(tokens: Sequence[int], probabilities: npt.NDArray[np.float64]) -> float:
    counts = np.bincount(tokens, minlength=VOCAB)
    assert not counts[probabilities == 0].any(), "a token that was cut off was drawn"
    live = probabilities > 0
    expected = probabilities[live] * len(tokens)
    return float(((counts[live] - expected) ** 2 / expected).sum())


def reference(temperature: float = 1, top_k: int = 0, top_p: float = 1, min_p: float = 0) -> npt.NDArray[np.float64]:
    """The same rules, written the slow way: one token after the other."""
    p = softmax(LOGITS / temperature)
    ranked = sorted(range(VOCAB), key=lambda token: (-p[token], token))
    if top_k > 0:
        ranked = ranked[:top_k]
    total, kept, mass = sum(p[token] for token in ranked), [], 0.0
    for token in ranked:
        kept.append(token)
        mass += p[token]
        if top_p < 1 and mass >= top_p * total:
            break
    kept = [token for token in kept if p[token] >= min_p * p[ranked[0]]]
    out = np.zeros(VOCAB)
    out[kept] = p[kept]
    return out / out.sum()


@pytest.mark.parametrize(
    "params",
    [
        {}, {"temperature": 0.6}, {"temperature": 3.0}, {"top_k": 5}, {"top_p": 0.8}, {"min_p": 0.3},
        {"temperature": 1.5, "top_k": 8, "top_p": 0.9, "min_p": 0.1},
    ],
    ids=str,
)  # fmt: skip
def test_draws_follow_the_exact_probabilities(params: dict[str, Any]) -> None:
    assert chi_squared(draws(4000, **params), reference(**params)) < 31.3, "11 degrees of freedom, 0.1 % level"


def test_a_sequence_of_draws_follows_the_probabilities_too() -> None:
    sequence = state(seed=9)
    tokens = []
    for _ in range(4000):
        tokens.append(one(LOGITS, sequence).token)
        sequence.record(tokens[-1])
    assert chi_squared(tokens, reference()) < 31.3


def test_top_k_keeps_exactly_k_when_values_are_equal() -> None:
    assert set(draws(300, np.zeros(VOCAB, np.float32), top_k=3)) == {0, 1, 2}
    assert set(draws(300, top_k=1)) == {1}, "1 and 6 are equal; the lower id stays"


def test_top_p_sorts_only_candidates_and_cuts_like_a_full_sort() -> None:
    rng = np.random.default_rng(3)
    logits = (rng.standard_normal(5000) * 4).astype(np.float32)
    p = softmax(logits)
    ranked = np.argsort(-p, kind="stable")
    for top_p in (0.05, 0.5, 0.9, 0.999):
        kept = set(ranked[: int(np.argmax(np.cumsum(p[ranked]) >= top_p)) + 1].tolist())
        drawn = {one(logits, state(seed=s, vocab=5000, top_p=top_p)).token for s in range(400)}
        assert drawn <= kept


@pytest.mark.parametrize(("u", "token"), [(0.0, 3), (0.5, 4), (1 - 2**-53, 4)])
def test_the_ends_of_the_unit_interval_draw_what_can_be_drawn(
    u: float, token: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("topg.sampling.sampler.uniform", lambda seed, index: u)
    logits = np.full(VOCAB, -np.inf, np.float32)
    logits[[3, 4]] = 1.0
    assert one(logits, state()).token == token, "equal weights: u = 0.5 stands exactly at the border"


# ---- seeds and neighbours


def test_the_same_seed_draws_the_same() -> None:
    assert draws(50) == draws(50)
    assert len(set(draws(50))) > 3


def test_rows_do_not_see_each_other() -> None:
    rng = np.random.default_rng(1)
    rows = rng.standard_normal((9, VOCAB)).astype(np.float32)
    settings: list[dict[str, Any]] = [
        {"temperature": 0}, {"repetition_penalty": 2.0}, {"temperature": 100.0}, {"top_k": 2, "logprobs": 2},
        {"logit_bias": {3: -100}}, {"logit_bias": {4: 100}}, {"top_p": 0.1}, {"frequency_penalty": 2.0}, {},
    ]  # fmt: skip

    def fresh(i: int) -> SamplerState:
        return state(prompt=[i, i + 1], generated=[2, 2, i], seed=i, **settings[i])

    alone = [sample(rows[i : i + 1], [fresh(i)])[0] for i in range(9)]
    for order in (list(range(9)), rng.permutation(9).tolist(), rng.permutation(9).tolist()):
        together = sample(rows[order], [fresh(i) for i in order])
        assert together == [alone[i] for i in order]


@pytest.mark.parametrize(
    "bad",
    [[np.nan] * VOCAB, [0.0] * (VOCAB - 1) + [np.nan], [-np.inf] * VOCAB, [0.0] * (VOCAB - 1) + [np.inf]],
    ids=["all NaN", "one NaN", "all -inf", "one inf"],
)
@pytest.mark.parametrize("temperature", [0, 1])
def test_a_row_without_numbers_fails_alone(bad: list[float], temperature: float) -> None:
    rows = np.stack([LOGITS, np.array(bad, np.float32), LOGITS])
    first, broken, last = sample(rows, [state(temperature=temperature) for _ in range(3)])
    assert isinstance(broken, ComputeError)
    assert first == last == one(LOGITS, state(temperature=temperature))


def test_a_masked_vocabulary_entry_is_no_fault() -> None:
    masked = LOGITS.copy()
    masked[1] = -np.inf
    assert one(masked, state(temperature=0)).token == 6


# ---- biases and penalties


def test_biases_are_added_exactly() -> None:
    plain = logprobs(state(logprobs=VOCAB))
    shifted = logprobs(state(logprobs=VOCAB, logit_bias={4: 1.5, 1: -99.0}))
    assert shifted[4] - shifted[0] == pytest.approx(plain[4] - plain[0] + 1.5, abs=1e-12)
    assert shifted[1] - shifted[0] == pytest.approx(plain[1] - plain[0] - 99, abs=1e-12)


@pytest.mark.parametrize("temperature", [0, 1, 100])
def test_banned_tokens_are_never_drawn_and_exclusive_ones_always(temperature: float) -> None:
    drawn = draws(200, temperature=temperature, logit_bias={1: -100, 6: -100})
    assert not {1, 6} & set(drawn)
    assert set(draws(50, temperature=temperature, logit_bias={5: 100})) == {5}
    assert set(draws(200, temperature=temperature, logit_bias={5: 100, 10: 100, 1: 99.9})) <= {5, 10}


def test_masked_tokens_are_left_out_of_logprobs() -> None:
    outcome = one(LOGITS, state(logprobs=5, logit_bias={5: 100}))
    assert outcome == Sampled(5, 0.0, ((5, 0.0),))


def test_biases_that_leave_no_token_are_an_error() -> None:
    (outcome,) = sample(LOGITS[None], [state(logit_bias={2: 100}, end_tokens=[2], min_tokens=1)])
    assert isinstance(outcome, ComputeError) and "min_tokens" in str(outcome)


def test_repetition_penalty_counts_a_token_once() -> None:
    plain = logprobs(state(logprobs=VOCAB))
    for prompt, generated in (([3], []), ([3] * 20, []), ([], [3]), ([3], [3, 3])):
        changed = logprobs(state(prompt, generated, logprobs=VOCAB, repetition_penalty=2.0))
        shift = (changed[3] - changed[4]) - (plain[3] - plain[4])
        assert shift == pytest.approx(1.5 / 2 - 1.5, abs=1e-12)


def test_repetition_penalty_divides_positive_and_multiplies_negative_logits() -> None:
    plain = logprobs(state(logprobs=VOCAB))
    changed = logprobs(state([1, 2, 4], logprobs=VOCAB, repetition_penalty=4.0))
    base = changed[0] - plain[0]
    assert changed[1] - plain[1] - base == pytest.approx(2.0 / 4 - 2.0, abs=1e-12)
    assert changed[2] - plain[2] - base == pytest.approx(-1.0 * 4 + 1.0, abs=1e-12)
    assert changed[4] - plain[4] - base == pytest.approx(0.0, abs=1e-12)


def test_presence_and_frequency_count_the_output_only() -> None:
    penalties = {"presence_penalty": 2.0, "frequency_penalty": 1.5, "logprobs": VOCAB}
    plain = logprobs(state(logprobs=VOCAB))
    assert logprobs(state([3, 3, 3], **penalties)) == plain
    changed = logprobs(state([3], [7, 3, 3, 3], **penalties))
    base = changed[0] - plain[0]
    assert changed[3] - plain[3] - base == pytest.approx(-(2.0 + 3 * 1.5), abs=1e-12)
    assert changed[7] - plain[7] - base == pytest.approx(-(2.0 + 1.5), abs=1e-12)


def test_penalties_follow_biases() -> None:
    plain = logprobs(state(logprobs=VOCAB))
    changed = logprobs(state([4], logprobs=VOCAB, logit_bias={4: 3.0}, repetition_penalty=2.0))
    assert (changed[4] - changed[0]) - (plain[4] - plain[0]) == pytest.approx(3.0 / 2, abs=1e-12)


def test_end_tokens_cannot_be_drawn_before_min_tokens() -> None:
    ending = {"temperature": 0, "end_tokens": [1], "min_tokens": 2}
    assert one(LOGITS, state(**ending)).token == 6
    assert one(LOGITS, state(generated=[0], **ending)).token == 6
    assert one(LOGITS, state(generated=[0, 0], **ending)).token == 1


# ---- log-probabilities


def test_logprobs_are_those_before_temperature_and_truncation() -> None:
    exact = np.log(softmax(LOGITS))
    outcome = one(LOGITS, state(temperature=0.1, top_k=1, logprobs=4))
    assert [token for token, _ in outcome.top] == [1, 6, 3, 11]
    np.testing.assert_allclose([value for _, value in outcome.top], exact[[1, 6, 3, 11]], rtol=1e-12)
    assert outcome.logprob == outcome.top[0][1]


def test_asking_for_logprobs_changes_no_draw() -> None:
    assert draws(100, logprobs=5) == draws(100) and draws(1, logprobs=0, temperature=0) == [1]
    assert one(LOGITS, state(logprobs=0)).top == ()


def test_logprobs_larger_than_the_vocabulary_give_all_of_it() -> None:
    assert len(logprobs(state(logprobs=20))) == VOCAB


def test_a_wrong_number_of_rows_is_refused() -> None:
    with pytest.raises(ComputeError, match="2 rows"):
        sample(np.zeros((2, VOCAB), np.float32), [state()])
