// Sampling in float64.  Only +, -, * and / in a fixed order, so that every instruction set gives the same bits; the
// vectors are the compiler's own, as wide as the processor's.
#pragma once

#include "kernels/kernels.h"
#include "kernels/simd_common.h"

namespace topg {
namespace {

#if defined(__AVX512F__)
constexpr int kDoubles = 8;
#elif defined(__AVX2__)
constexpr int kDoubles = 4;
#else
constexpr int kDoubles = 2;
#endif
typedef double Doubles __attribute__((vector_size(kDoubles * sizeof(double)), aligned(alignof(double)), may_alias));
typedef uint64_t Bits __attribute__((vector_size(kDoubles * sizeof(uint64_t))));
typedef float Floats __attribute__((vector_size(kDoubles * sizeof(float)), aligned(alignof(float)), may_alias));

TOPG_INLINE const Doubles& vector_at(const double* p) { return *reinterpret_cast<const Doubles*>(p); }
TOPG_INLINE Doubles& vector_at(double* p) { return *reinterpret_cast<Doubles*>(p); }

// exp of each x <= 0, within 1 ulp; 0 where the result would be denormal, and for -inf.
TOPG_INLINE Doubles exponentials(const Doubles& x) {
  constexpr double kLog2OfE = 0x1.71547652b82fep0;
  constexpr double kLn2High = 0x1.62e42fefa0000p-1;  // its last bits are zeros: times a whole number up to 2048 it is exact
  constexpr double kLn2Low = 0x1.cf79abc9e3b39p-40;
  constexpr double kSmallest = -708.0;
  constexpr double kRound = 0x1.8p52;  // added to a number it leaves the number's whole part in the lowest bits
  constexpr int kCount = 12;
  // 1 / n! for the terms of degree n = 13 down to 2: |r| is at most ln(2) / 2.
  constexpr double kTerms[kCount] = {1.0 / 6227020800, 1.0 / 479001600, 1.0 / 39916800, 1.0 / 3628800,
                                     1.0 / 362880,     1.0 / 40320,     1.0 / 5040,     1.0 / 720,
                                     1.0 / 120,        1.0 / 24,        1.0 / 6,        1.0 / 2};
  const Bits in_range = (Bits)(x >= kSmallest);
  const Doubles shifted = x * kLog2OfE + kRound, whole = shifted - kRound;
  const Doubles r = (x - whole * kLn2High) - whole * kLn2Low;
  Doubles sum = r * kTerms[0] + kTerms[1];
  unroll<kCount - 2>([&](auto i) TOPG_INLINE_LAMBDA { sum = sum * r + kTerms[i + 2]; });
  sum = 1.0 + (r + (r * r) * sum);
  const Bits scaled = (Bits)sum + ((Bits)shifted << 52);  // times 2^whole
  return (Doubles)(scaled & in_range);
}

inline void widen(const float* x, int count, double* out) {
  int i = 0;
  for (; i + kDoubles <= count; i += kDoubles) {
    vector_at(out + i) = __builtin_convertvector(*reinterpret_cast<const Floats*>(x + i), Doubles);
  }
  for (; i < count; ++i) out[i] = x[i];
}

inline void run_maxima(const double* x, int count, double* maxima) {
  for (int first = 0; first < count; first += kSampleRun) {
    double best = x[first];
    if (first + kSampleRun <= count) {
      Doubles lanes = vector_at(x + first);
      for (int i = kDoubles; i < kSampleRun; i += kDoubles) {
        const Doubles next = vector_at(x + first + i);
        lanes = next > lanes ? next : lanes;
      }
      for (int lane = 0; lane < kDoubles; ++lane) best = lanes[lane] > best ? lanes[lane] : best;
    } else {
      for (int i = first; i < count; ++i) best = x[i] > best ? x[i] : best;
    }
    *maxima++ = best;
  }
}

// One after the other, as every back end adds; the processor computes the next vectors meanwhile.
TOPG_INLINE double add_in_order(double sum, const double* weights) {
  unroll<kDoubles>([&](auto i) TOPG_INLINE_LAMBDA { sum += weights[i]; });
  return sum;
}

inline void weights(const double* logits, int count, double maximum, double temperature, double* weights, double* sums) {
  double sum = 0;
  int first = 0;
  for (; first + kDoubles <= count; first += kDoubles) {
    const Doubles x = (vector_at(logits + first) - maximum) / temperature;
    vector_at(weights + first) = exponentials(x);
    sum = add_in_order(sum, weights + first);
    sums[first / kSampleRun] = sum;
  }
  if (first == count) return;
  const int left = count - first;  // less than a vector
  double last[kDoubles] = {};
  __builtin_memcpy(last, logits + first, size_t(left) * sizeof(double));
  vector_at(last) = exponentials((vector_at(last) - maximum) / temperature);
  __builtin_memcpy(weights + first, last, size_t(left) * sizeof(double));
  for (int i = 0; i < left; ++i) sum += weights[first + i];
  sums[first / kSampleRun] = sum;
}

inline SamplingKernels sampling_kernels() { return {widen, run_maxima, weights}; }

}  // namespace
}  // namespace topg
