"""From logits to the next token, row by row.

The order is fixed, and every number is a float64:

    1. biases and bans       added; banned tokens, and end tokens before `min_tokens`, become -inf
    2. penalties             repetition (prompt and output, once per token), then presence and frequency (output)
    3. log-probabilities     reported from here: log-softmax of what stands now
    4. temperature           greedy (below 0.00001): the best token, the lowest id among equals
    5. top-k, top-p, min-p   see `truncation`; top-p and min-p on what top-k left
    6. draw                  cumulative weights in order of ids; the first that exceeds u * total, u from the seed

A row depends on its own logits and state alone, never on its neighbours.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from topg.errors import ComputeError
from topg.sampling.random_numbers import uniform
from topg.sampling.truncation import Weights, keep_min_p, keep_top_p, ordered_sum, top_k_tokens
from topg.sampling_params import SamplingParams

Logits = npt.NDArray[np.float32]

UNUSABLE_LOGITS = "the model's logits are not usable numbers (NaN, infinite, or nothing but -inf)"
NO_TOKEN_LEFT = "logit_bias, min_tokens and the end tokens leave no token that may be drawn"


@dataclass(frozen=True)
class Sampled:
    """A drawn token; with logprobs asked for, its log-probability and the best (id, log-probability), best first."""

    token: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


class SamplerState:
    """What sampling remembers of one sequence: its settings, and which tokens occurred.

    end_tokens  ids that would end the sequence; they are banned until `min_tokens` tokens were generated
    output      the tokens generated so far
    """

    def __init__(
        self, params: SamplingParams, seed: int, prompt: Sequence[int], end_tokens: Collection[int], vocab: int
    ) -> None:
        self.params = params
        self.seed = seed
        self.prompt = prompt
        self.end_tokens = sorted(end_tokens)
        self.vocab = vocab
        self.output: list[int] = []
        self._seen = _occurrences(prompt, vocab) if params.repetition_penalty != 1.0 else None
        counts_output = params.presence_penalty != 0.0 or params.frequency_penalty != 0.0
        self._output_counts = np.zeros(vocab, np.int32) if counts_output else None

    @property
    def generated(self) -> int:
        """How many tokens were generated."""
        return len(self.output)

    def record(self, token: int) -> None:
        """Note that `token` was generated."""
        self.output.append(token)
        if self._seen is not None:
            self._seen[token] = True
        if self._output_counts is not None:
            self._output_counts[token] += 1

    @property
    def adjusts(self) -> bool:
        """Whether biases, bans or penalties change the next token's logits."""
        return bool(
            self.params.logit_bias or self.banned() or self._seen is not None or self._output_counts is not None
        )

    def banned(self) -> Sequence[int]:
        """Ids that cannot be drawn now."""
        early = self.end_tokens if self.generated < self.params.min_tokens else []
        return [*self.params.banned_tokens, *early]

    def adjust(self, logits: Logits) -> Weights:
        """Logits [vocab] after biases, bans and penalties, as a float64 copy."""
        adjusted = logits.astype(np.float64)
        self._bias(adjusted)
        self._penalise(adjusted)
        return adjusted

    def _bias(self, logits: Weights) -> None:
        for token, bias in self.params.added_biases.items():
            logits[token] += bias
        exclusive = list(self.params.exclusive_tokens)
        if exclusive:
            kept = logits[exclusive]
            logits[:] = -np.inf
            logits[exclusive] = kept
        logits[list(self.banned())] = -np.inf

    def _penalise(self, logits: Weights) -> None:
        if self._seen is not None:
            seen = np.flatnonzero(self._seen)
            values = logits[seen]
            penalty = self.params.repetition_penalty
            logits[seen] = np.where(values > 0, values / penalty, values * penalty)
        if self._output_counts is not None:
            generated = np.flatnonzero(self._output_counts)
            frequency = self.params.frequency_penalty * self._output_counts[generated]
            logits[generated] -= self.params.presence_penalty + frequency


def sample(logits: Logits, states: Sequence[SamplerState]) -> list[Sampled | ComputeError]:
    """The next token of every row; `logits` is float32 [rows, vocab], row i belonging to states[i].

    A row without usable numbers gives a ComputeError in its place; the other rows are not touched by it.  States are
    read, not changed: call `record` once a token is accepted.
    """
    if logits.shape[0] != len(states):
        raise ComputeError(f"the back end returned {logits.shape[0]} rows of logits; {len(states)} were asked for")
    return [_sample_row(row, state) for row, state in zip(logits, states, strict=True)]


def _sample_row(row: Logits, state: SamplerState) -> Sampled | ComputeError:
    if not _usable(row):
        return ComputeError(UNUSABLE_LOGITS)
    if state.params.greedy and not state.adjusts and state.params.logprobs is None:
        return Sampled(int(np.argmax(row)))
    adjusted = state.adjust(row)
    best = adjusted.max()
    if best == -np.inf:
        return ComputeError(NO_TOKEN_LEFT)
    token = int(np.argmax(adjusted)) if state.params.greedy else _draw(adjusted, state)
    return _with_logprobs(adjusted, token, state.params.logprobs)


def _usable(row: Logits) -> bool:
    """Whether the row has a finite maximum; a NaN anywhere makes the maximum NaN."""
    return bool(np.isfinite(row.max()))


def _draw(logits: Weights, state: SamplerState) -> int:
    params = state.params
    tokens = top_k_tokens(logits, params.top_k)
    candidates = logits if tokens is None else logits[tokens]
    weights = np.exp((candidates - candidates.max()) / params.temperature)
    weights = keep_min_p(keep_top_p(weights, params.top_p), params.min_p)
    cumulative = np.cumsum(weights)
    target = uniform(state.seed, state.generated) * cumulative[-1]
    place = int(np.searchsorted(cumulative, target, side="right"))
    return place if tokens is None else int(tokens[place])


def _with_logprobs(logits: Weights, token: int, wanted: int | None) -> Sampled:
    if wanted is None:
        return Sampled(token)
    shifted = logits - logits.max()
    log_total = np.log(ordered_sum(np.exp(shifted)))
    top = tuple((int(i), float(shifted[i] - log_total)) for i in _best(logits, wanted))
    return Sampled(token, float(shifted[token] - log_total), top)


def _best(logits: Weights, count: int) -> npt.NDArray[np.intp]:
    """Ids of the `count` best finite entries, best first, the lower id first among equals."""
    if count == 0:
        return np.empty(0, np.intp)
    best = top_k_tokens(logits, count)
    candidates = np.arange(logits.shape[0]) if best is None else best
    ranked = candidates[np.argsort(-logits[candidates], kind="stable")]
    return ranked[logits[ranked] > -np.inf]


def _occurrences(tokens: Sequence[int], vocab: int) -> npt.NDArray[np.bool_]:
    seen = np.zeros(vocab, np.bool_)
    seen[list(tokens)] = True
    return seen
