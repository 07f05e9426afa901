"""Philox against the known answers of its authors and numpy's own version."""

from __future__ import annotations

import numpy as np
import pytest

from topg.sampling import philox4x64, uniform

# Known-answer test of the Random123 library, "philox4x64 10".
KNOWN_ANSWERS = [
    ((0, 0), (0, 0, 0, 0), (0x16554D9ECA36314C, 0xDB20FE9D672D0FDC, 0xD7E772CEE186176B, 0x7E68B68AEC7BA23B)),
    (
        (2**64 - 1,) * 2, (2**64 - 1,) * 4,
        (0x87B092C3013FE90B, 0x438C3C67BE8D0224, 0x9CC7D7C69CD777B6, 0xA09CAEBF594F0BA0),
    ),
]  # fmt: skip


@pytest.mark.parametrize(("key", "counter", "words"), KNOWN_ANSWERS)
def test_known_answers(key: tuple[int, int], counter: tuple[int, int, int, int], words: tuple[int, ...]) -> None:
    assert philox4x64(key, counter) == words


@pytest.mark.parametrize("seed", [0, 1, 2**63, 2**64 - 1])
@pytest.mark.parametrize("index", [1, 7, 100_000])
def test_agrees_with_numpy(seed: int, index: int) -> None:
    # numpy moves its counter on before it draws
    generator = np.random.Philox(key=np.array([seed, 0], np.uint64), counter=[index - 1, 0, 0, 0])
    assert philox4x64((seed, 0), (index, 0, 0, 0)) == tuple(generator.random_raw(4).tolist())


def test_uniform_fills_the_unit_interval() -> None:
    draws = np.array([uniform(5, index) for index in range(4000)])
    assert draws.min() >= 0 and draws.max() < 1
    counts, _ = np.histogram(draws, bins=20, range=(0, 1))
    chi_squared = float(((counts - 200) ** 2 / 200).sum())
    assert chi_squared < 43.8, "19 degrees of freedom, 0.1 % level"


def test_seeds_and_indices_give_different_numbers() -> None:
    assert len({uniform(seed, index) for seed in range(30) for index in range(30)}) == 900
