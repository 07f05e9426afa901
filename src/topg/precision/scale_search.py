"""Scales of 4-bit groups: a few candidates, then least squares, judged by the error with the scale as stored.

Groups come as lanes [group size, groups], one group a column, so that every operation runs over contiguous memory and
no group's result depends on its neighbours.  All sums over a group are taken in a fixed tree order.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from topg.precision.formats import ScaleFormat
from topg.precision.storage import rounded

Lanes = NDArray[np.float32]
Vector = NDArray[np.float32]

SYMMETRIC_CODES = (-8, 7)
UNSIGNED_CODES = (0, 15)

# The code that a group's value of largest magnitude lands on, a third of a step apart.  Beyond -8 and 7 that value is
# clipped and the others gain.  A grid ten times as fine lowers the error by another 0.1 % only.
_EXTREME_CODES = tuple(thirds / 3 for thirds in (21, -21, -22, -23, -25, -26, -27, 19, 20, 22, 23, 24))
# Steps between a group's smallest and largest value.  Beyond 15 both ends are clipped.
_RANGE_STEPS = (14.0, 14.5, 15.5, 16.0, 16.5, 17.0)
_SCALE_REFINEMENTS = 2
_LINE_REFINEMENTS = 4


def nearest_codes(
    lanes: Lanes, scales: Vector, minimums: Vector | None, limits: tuple[int, int], out: Lanes | None = None
) -> Lanes:
    """The integer codes, as float32 lanes, that come nearest to the values with these (stored) scales.

    A scale of zero stands for a group that is all zeros, or too small for its scale to be stored: its codes are zero.
    """
    divisors = np.where(scales == 0, np.float32(1), scales)
    if minimums is None:
        codes: Lanes = np.divide(lanes, divisors, out=out)
    else:
        codes = np.subtract(lanes, minimums, out=out)
        codes /= divisors
    np.rint(codes, out=codes)
    np.maximum(codes, np.float32(limits[0]), out=codes)
    np.minimum(codes, np.float32(limits[1]), out=codes)
    return codes


def symmetric_int4_scales(lanes: Lanes, scale_format: ScaleFormat, *, search: bool = True) -> Vector:
    """Scales [groups], as stored, for codes -8..7; a scale may be negative, so that the extreme value can get -8.

    Without `search` the extreme value gets -8.  With it, no group's squared error is larger than that.
    """
    extreme = _signed_extreme(lanes)
    fit = _Fit(lanes, SYMMETRIC_CODES, rounded(extreme / np.float32(-8), scale_format), None)
    if search:
        for code in _EXTREME_CODES:
            fit.consider(rounded(extreme / np.float32(code), scale_format), None)
        for _ in range(_SCALE_REFINEMENTS):
            fit.consider(rounded(fit.least_squares_scales(), scale_format), None)
    return fit.scales


def asymmetric_int4_scales(lanes: Lanes, scale_format: ScaleFormat, *, search: bool = True) -> tuple[Vector, Vector]:
    """Scales and minimums [groups], as stored, for codes 0..15.

    Without `search` codes 0 and 15 are a group's smallest and largest value.  With it, no group's squared error is
    larger than that.
    """
    low, high = lanes.min(axis=0) + np.float32(0), lanes.max(axis=0)  # adding zero turns -0 into +0
    fit = _Fit(lanes, UNSIGNED_CODES, *_stored_range(low, high, 15.0, scale_format))
    assert fit.minimums is not None
    if search:
        for steps in _RANGE_STEPS:
            fit.consider(*_stored_range(low, high, steps, scale_format))
        for _ in range(_LINE_REFINEMENTS):
            scales, minimums = fit.least_squares_lines()
            fit.consider(rounded(scales, scale_format), rounded(minimums, scale_format))
    return fit.scales, fit.minimums


class _Fit:
    """The best scales (and minimums) seen so far for each group, and the squared error they leave."""

    def __init__(self, lanes: Lanes, limits: tuple[int, int], scales: Vector, minimums: Vector | None) -> None:
        self._lanes = lanes
        self._limits = limits
        self._codes, self._work = np.empty_like(lanes), np.empty_like(lanes)
        self.scales = scales
        self.minimums = minimums
        self.errors = self._squared_errors(scales, minimums)

    def consider(self, scales: Vector, minimums: Vector | None) -> None:
        """Take these scales wherever their error is smaller."""
        errors = self._squared_errors(scales, minimums)
        better = errors < self.errors  # false where a candidate overflows: its error is not a number
        np.copyto(self.errors, errors, where=better)
        np.copyto(self.scales, scales, where=better)
        if self.minimums is not None and minimums is not None:
            np.copyto(self.minimums, minimums, where=better)

    def least_squares_scales(self) -> Vector:
        """For the present codes q of values x, the s that minimises sum (x - s q)^2: sum x q / sum q q."""
        codes = nearest_codes(self._lanes, self.scales, None, self._limits, self._codes)
        with np.errstate(all="ignore"):
            along = _tree_sum(np.multiply(codes, self._lanes, out=self._work))
            square = _tree_sum(np.multiply(codes, codes, out=self._work))
            scales: Vector = np.where(square > 0, along / square, self.scales)
        return scales

    def least_squares_lines(self) -> tuple[Vector, Vector]:
        """For the present codes q of values x, the s and m that minimise sum (x - s q - m)^2: a straight line's fit."""
        assert self.minimums is not None
        codes = nearest_codes(self._lanes, self.scales, self.minimums, self._limits, self._codes)
        count = np.float32(len(codes))
        with np.errstate(all="ignore"):
            mean_value = _tree_sum(self._lanes.copy()) / count
            mean_code = _tree_sum(codes.copy()) / count
            codes -= mean_code
            along = _tree_sum(np.multiply(codes, self._lanes, out=self._work))
            square = _tree_sum(np.multiply(codes, codes, out=self._work))
            scales = np.where(square > 0, along / square, self.scales)
            return scales, np.where(square > 0, mean_value - scales * mean_code, self.minimums)

    def _squared_errors(self, scales: Vector, minimums: Vector | None) -> Vector:
        with np.errstate(all="ignore"):
            values = nearest_codes(self._lanes, scales, minimums, self._limits, self._codes)
            values *= scales
            if minimums is not None:
                values += minimums
            np.subtract(self._lanes, values, out=self._work)
            self._work *= self._work
            return _tree_sum(self._work)


def _signed_extreme(lanes: Lanes) -> Vector:
    """Each group's value of largest magnitude; the positive one where two are as large."""
    low, high = lanes.min(axis=0), lanes.max(axis=0)
    extreme: Vector = np.where(high >= -low, high, low)
    return extreme


def _stored_range(low: Vector, high: Vector, steps: float, scale_format: ScaleFormat) -> tuple[Vector, Vector]:
    """Scale and minimum that cut [low, high] into `steps` steps, with codes 0..15 in their middle."""
    scales = (high - low) / np.float32(steps)
    minimums = low + scales * np.float32((steps - 15) / 2)
    return rounded(scales, scale_format), rounded(minimums, scale_format)


def _tree_sum(lanes: Lanes) -> Vector:
    """Sum over the first axis (a power of two) by adding halves; overwrites `lanes`.

    numpy's own sum takes another order when there is one column only: a group's bits would depend on its neighbours.
    """
    length = len(lanes)
    while length > 1:
        length //= 2
        lanes[:length] += lanes[length : 2 * length]
    total: Vector = lanes[0].copy()
    return total
