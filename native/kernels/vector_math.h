// Exponentials and their relatives on vectors, to about 2e-7 relative.  The same formulas on every instruction set; the
// library's functions would differ between machines, and between vectors and their tails.
//
// The polynomials are minimax fits over the intervals named beside them.
#pragma once

#include "kernels/simd.h"

namespace topg {
namespace {

// c[0] + c[1] x + c[2] x^2 + ...
template <int N>
TOPG_INLINE F32 polynomial(F32 x, const float (&c)[N]) {
  F32 sum = splat(c[N - 1]);
  for (int i = N - 2; i >= 0; --i) sum = fma(sum, x, splat(c[i]));
  return sum;
}

// Adding this rounds a number below 2^22 to a whole one n, and leaves n + 126 in the lowest bits of the sum.
constexpr float kRoundAndBias = 12582912.0f + 126;

// 2^(n - 1) of `biased` = n + kRoundAndBias, for n in -126 .. 128; 0 for n = -126.
TOPG_INLINE F32 half_power_of_two(F32 biased) { return from_bits(shift_left<23>(bits(biased))); }

// 2^x.  Infinite from x = 128 on, 0 below -125.5; NaN stays NaN.
TOPG_INLINE F32 exp2(F32 x) {
  x = min(splat(128.0f), max(splat(-126.0f), x));
  const F32 biased = x + splat(kRoundAndBias);
  const F32 fraction = x - (biased - splat(kRoundAndBias));  // -0.5 .. 0.5
  // Twice 2^fraction times half the power: 2^128 itself would not be a float.
  const F32 twice = polynomial(fraction, {2.0f, 2 * 0.693147f, 2 * 0.24022242f, 2 * 0.05550734f, 2 * 0.009671513f,
                                          2 * 0.0013264718f});
  return twice * half_power_of_two(biased);
}

// e^x.  Infinite above x = 88.73, 0 below -86.99; NaN stays NaN.
TOPG_INLINE F32 exp(F32 x) {
  constexpr float kLog2E = 1.44269504f;
  // ln 2 in two parts; the upper one has few bits, so that its product with n is exact.
  constexpr float kLn2Upper = 0.693359375f, kLn2Lower = -2.12194440e-4f;
  x = min(splat(88.8f), max(splat(-87.5f), x));
  const F32 biased = fma(x, splat(kLog2E), splat(kRoundAndBias));
  const F32 n = biased - splat(kRoundAndBias);
  const F32 rest = fma(n, splat(-kLn2Lower), fma(n, splat(-kLn2Upper), x));  // within 0.3475 of 0
  const F32 twice = polynomial(rest, {2.0f, 2.0f, 2 * 0.49999225f, 2 * 0.16667119f, 2 * 0.04189129f, 2 * 0.008312404f});
  return twice * half_power_of_two(biased);
}

TOPG_INLINE F32 with_sign_of(F32 magnitude, F32 sign) { return select(less(sign, zero()), zero() - magnitude, magnitude); }

// NaN stays NaN.
TOPG_INLINE F32 tanh(F32 x) {
  const F32 square = x * x;
  const F32 series = polynomial(square, {-0.3333328f, 0.13331442f, -0.05373972f, 0.0206391f, -0.0057049994f});
  const F32 small = fma(x * square, series, x);  // |x| < 0.625
  const F32 magnitude = abs(x);
  const F32 large = splat(1.0f) - splat(2.0f) / (exp(magnitude + magnitude) + splat(1.0f));
  return select(less(magnitude, splat(0.625f)), small, with_sign_of(large, x));
}

// The error function.  NaN stays NaN.
TOPG_INLINE F32 erf(F32 x) {
  const F32 magnitude = min(splat(4.0f), abs(x));  // 1 - erf(4) is less than half a unit in the last place of 1
  const F32 small = x * polynomial(x * x, {1.1283791f, -0.37612325f, 0.11280169f, -0.026711073f, 0.004917316f,
                                           -0.00056305766f});  // |x| < 1
  // log2(1 - erf(x)) is almost a parabola: fitted on 0.98 .. 4.
  const F32 exponent = polynomial(magnitude, {-0.000433401f, -1.6262802f, -0.92027056f, -0.14907002f, 0.031653434f,
                                              -0.0042883493f, 0.00027241724f});
  const F32 large = splat(1.0f) - exp2(exponent);
  return select(less(magnitude, splat(1.0f)), small, with_sign_of(large, x));
}

}  // namespace
}  // namespace topg
