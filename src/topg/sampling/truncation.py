"""Cutting the distribution's tail: top-k, top-p, min-p.

Weights are float64 and unnormalised probabilities, in ascending order of their token ids; at least one is positive, and
a token with weight 0 is out.  Equals rank by id, the lower id first, and the best token always stays.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Weights = npt.NDArray[np.float64]


def top_k_tokens(logits: Weights, k: int) -> npt.NDArray[np.intp] | None:
    """Ids of the `k` best of `logits` [vocab], ascending; None, for all, when k is below 1 or at least vocab."""
    vocab = logits.shape[0]
    if not 0 < k < vocab:
        return None
    threshold = np.partition(logits, vocab - k)[vocab - k]
    kept = logits > threshold
    ties = np.flatnonzero(logits == threshold)
    kept[ties[: k - np.count_nonzero(kept)]] = True
    return np.flatnonzero(kept)


def keep_top_p(weights: Weights, p: float) -> Weights:
    """Keep the fewest best tokens whose weights add up to at least `p` of the total; 1 keeps all."""
    if p >= 1.0:
        return weights
    total = ordered_sum(weights)
    candidates = np.flatnonzero(weights >= _certain_tail(total, p, weights.shape[0]))
    ranked = candidates[np.argsort(-weights[candidates], kind="stable")]
    reached = np.cumsum(weights[ranked]) >= p * total
    kept = ranked[: int(np.argmax(reached)) + 1] if reached.any() else ranked
    return _only(weights, kept)


def keep_min_p(weights: Weights, p: float) -> Weights:
    """Keep tokens with at least `p` times the best token's weight."""
    if p <= 0.0:
        return weights
    return np.where(weights >= p * weights.max(), weights, 0.0)


def ordered_sum(weights: Weights) -> float:
    """Sum in the order given, one after the other: an order that every back end can repeat."""
    return float(np.cumsum(weights)[-1])


def _certain_tail(total: float, p: float, vocab: int) -> float:
    """A weight below which no token can be kept, so that only the others need sorting.

    All tokens below it together hold less than the share 1 - p, and they come last.  Half of the share leaves room
    for rounding.
    """
    return 0.5 * (1.0 - p) * total / vocab


def _only(weights: Weights, tokens: npt.NDArray[np.intp]) -> Weights:
    kept = np.zeros_like(weights)
    kept[tokens] = weights[tokens]
    return kept
