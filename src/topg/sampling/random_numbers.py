"""Counter-based random numbers: a request's n-th draw depends on its seed and n, and on nothing else.

Philox4x64-10 (Salmon, Moraes, Dror, Shaw: "Parallel random numbers: as easy as 1, 2, 3", SC 2011).  There is no state
to carry: a preempted, restarted or batched request draws what it would have drawn alone.

The draw for output token n (0 for the first) of a request with seed s, for whoever writes a kernel:

    key     = (s, 0)
    counter = (n, 0, 0, 0)
    word    = the first of the four 64-bit output words
    u       = (word >> 11) * 2**-53          a float64 in [0, 1)
"""

from __future__ import annotations

_MASK = 2**64 - 1
_MULTIPLIERS = (0xD2E7470EE14C6C93, 0xCA5A826395121157)
_KEY_STEPS = (0x9E3779B97F4A7C15, 0xBB67AE8584CAA73B)
_ROUNDS = 10

Words = tuple[int, int, int, int]


def philox4x64(key: tuple[int, int], counter: Words) -> Words:
    """Four random 64-bit words for a key of two words and a counter of four, lowest word first."""
    k0, k1 = key
    c0, c1, c2, c3 = counter
    for _ in range(_ROUNDS):
        left = _MULTIPLIERS[0] * c0
        right = _MULTIPLIERS[1] * c2
        c0, c1, c2, c3 = (right >> 64) ^ c1 ^ k0, right & _MASK, (left >> 64) ^ c3 ^ k1, left & _MASK
        k0, k1 = (k0 + _KEY_STEPS[0]) & _MASK, (k1 + _KEY_STEPS[1]) & _MASK
    return c0, c1, c2, c3


def uniform(seed: int, index: int) -> float:
    """The number in [0, 1) that decides output token `index` of a request with this seed."""
    word = philox4x64((seed, 0), (index, 0, 0, 0))[0]
    return float(word >> 11) * 2.0**-53
