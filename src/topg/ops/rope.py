"""Rotary position embedding: every spelling in use, reduced to one inverse-frequency table.

Pairs are always (i, i + dim/2) ("half-split"); importers permute weights that were stored interleaved.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from topg.errors import CheckpointError

# Wider than anything published, and narrow enough that no angle overflows or loses its digits.
MAX_THETA = 1e12
MIN_FACTOR, MAX_FACTOR = 1e-3, 1e6
MAX_LENGTH = 1 << 31

FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True)
class LinearScaling:
    """Positions divided by `factor`."""

    kind: ClassVar[str] = "linear"
    factor: float


@dataclass(frozen=True)
class DynamicScaling:
    """NTK-aware base that grows once a position passes `original_length`.

    Position p uses the base for length max(p + 1, original_length): what a token-by-token decode in transformers
    computes.  It depends on the position alone, so the answer does not depend on how a prompt was cut into chunks.
    """

    kind: ClassVar[str] = "dynamic"
    factor: float
    original_length: int


@dataclass(frozen=True)
class Llama3Scaling:
    """Low frequencies divided by `factor`, high ones kept, a smooth ramp between (LLaMA 3.1)."""

    kind: ClassVar[str] = "llama3"
    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_length: int


@dataclass(frozen=True)
class YarnScaling:
    """YaRN (arXiv 2309.00071): interpolation below, extrapolation above a correction range, and a softmax factor."""

    kind: ClassVar[str] = "yarn"
    factor: float
    original_length: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True


@dataclass(frozen=True)
class FactorScaling:
    """Each frequency divided by its own factor (the `rope_freqs` tensor of a GGUF)."""

    kind: ClassVar[str] = "factors"
    factors: tuple[float, ...]


RopeScaling = LinearScaling | DynamicScaling | Llama3Scaling | YarnScaling | FactorScaling
SCALING_KINDS: dict[str, type[RopeScaling]] = {
    scaling.kind: scaling for scaling in (LinearScaling, DynamicScaling, Llama3Scaling, YarnScaling, FactorScaling)
}


@dataclass(frozen=True)
class Rope:
    """Rotation of the first `dim` values of each head (even; the rest pass through).

    Raises CheckpointError for values that give no finite angles, whichever file they come from.
    """

    dim: int
    theta: float
    scaling: RopeScaling | None = None

    def __post_init__(self) -> None:
        if self.dim < 2 or self.dim % 2:
            raise CheckpointError(f"rope: {self.dim} rotated values per head; expected an even number from 2 on")
        if not 1 < self.theta <= MAX_THETA:
            raise CheckpointError(f"rope: theta is {self.theta}; expected more than 1 and at most {MAX_THETA:g}")
        if self.scaling is not None:
            _check_scaling(self, self.scaling)

    @property
    def attention_factor(self) -> float:
        """Factor on cos and sin (1.0 except for YaRN)."""
        return _yarn_attention_factor(self.scaling) if isinstance(self.scaling, YarnScaling) else 1.0

    def angles(self, positions: npt.NDArray[np.int64]) -> FloatArray:
        """Rotation angles [len(positions), dim/2] in radians, float64."""
        exponents = np.arange(0, self.dim, 2, dtype=np.float64) / self.dim
        if isinstance(self.scaling, DynamicScaling):
            return positions[:, None] / self._dynamic_base(positions, self.scaling)[:, None] ** exponents
        # float32, as every published implementation stores the table: long contexts then agree with them
        table = (1.0 / self.theta**exponents).astype(np.float32).astype(np.float64)
        return positions[:, None] * _scaled(table, self)

    def _dynamic_base(self, positions: npt.NDArray[np.int64], scaling: DynamicScaling) -> FloatArray:
        length = np.maximum(positions + 1, scaling.original_length)
        growth = scaling.factor * length / scaling.original_length - (scaling.factor - 1)
        return np.asarray(self.theta * growth ** (self.dim / (self.dim - 2)), dtype=np.float64)


def _check_scaling(rope: Rope, scaling: RopeScaling) -> None:
    for field in fields(scaling):
        value = getattr(scaling, field.name)
        least, most = (1, MAX_LENGTH) if field.name == "original_length" else (MIN_FACTOR, MAX_FACTOR)
        for number in value if isinstance(value, tuple) else (value,):
            if number is not None and not isinstance(number, bool) and not least <= number <= most:
                raise CheckpointError(f"rope: {scaling.kind} {field.name} is {number}; expected {least} to {most:,.0f}")
    if isinstance(scaling, DynamicScaling) and rope.dim == 2:
        raise CheckpointError("rope: dynamic scaling needs more than 2 rotated values per head")
    if isinstance(scaling, YarnScaling) and scaling.beta_fast < scaling.beta_slow:
        raise CheckpointError(
            f"rope: yarn beta_fast is {scaling.beta_fast:g}; it must not be below beta_slow, {scaling.beta_slow:g}"
        )
    if isinstance(scaling, Llama3Scaling) and scaling.low_freq_factor >= scaling.high_freq_factor:
        raise CheckpointError(
            f"rope: low_freq_factor {scaling.low_freq_factor} must be below high_freq_factor {scaling.high_freq_factor}"
        )
    if isinstance(scaling, FactorScaling) and len(scaling.factors) != rope.dim // 2:
        raise CheckpointError(f"rope: {len(scaling.factors)} factors are given; expected {rope.dim // 2}")


def _scaled(inverse: FloatArray, rope: Rope) -> FloatArray:
    scaling = rope.scaling
    if isinstance(scaling, LinearScaling):
        return inverse / scaling.factor
    if isinstance(scaling, Llama3Scaling):
        return _llama3(inverse, scaling)
    if isinstance(scaling, YarnScaling):
        return _yarn(inverse, rope, scaling)
    if isinstance(scaling, FactorScaling):
        return inverse / np.asarray(scaling.factors, dtype=np.float64)
    return inverse


def _llama3(inverse: FloatArray, scaling: Llama3Scaling) -> FloatArray:
    wavelength = 2 * math.pi / inverse
    longest = scaling.original_length / scaling.low_freq_factor
    shortest = scaling.original_length / scaling.high_freq_factor
    smooth = (scaling.original_length / wavelength - scaling.low_freq_factor) / (
        scaling.high_freq_factor - scaling.low_freq_factor
    )
    blended = (1 - smooth) * inverse / scaling.factor + smooth * inverse
    return np.where(wavelength > longest, inverse / scaling.factor, np.where(wavelength < shortest, inverse, blended))


def _yarn(inverse: FloatArray, rope: Rope, scaling: YarnScaling) -> FloatArray:
    low, high = (_yarn_dimension(rotations, rope, scaling) for rotations in (scaling.beta_fast, scaling.beta_slow))
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.dim - 1)
    high = high + 0.001 if low == high else high
    interpolate: FloatArray = np.clip((np.arange(rope.dim // 2) - low) / (high - low), 0, 1)
    return inverse / scaling.factor * interpolate + inverse * (1 - interpolate)


def _yarn_dimension(rotations: float, rope: Rope, scaling: YarnScaling) -> float:
    """The dimension that turns `rotations` times over the original length."""
    return rope.dim * math.log(scaling.original_length / (rotations * 2 * math.pi)) / (2 * math.log(rope.theta))


def _yarn_attention_factor(scaling: YarnScaling) -> float:
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    if scaling.mscale and scaling.mscale_all_dim:
        return _mscale(scaling.factor, scaling.mscale) / _mscale(scaling.factor, scaling.mscale_all_dim)
    return _mscale(scaling.factor, 1.0)


def _mscale(factor: float, weight: float) -> float:
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0
