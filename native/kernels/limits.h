// Loops that measure what the processor can do at most: see PeakKernels.
#pragma once

#include "kernels/dot_sum.h"
#include "kernels/kernels.h"
#include "kernels/simd.h"

#if defined(__AMX_INT8__)
#include <immintrin.h>
#endif

namespace topg {
namespace {

constexpr int kChains = 16;  // independent sums: more than latency times throughput of any multiplier

// A compiler must neither drop the sums nor see that the factors never change.
TOPG_INLINE void keep(F32& x) { asm volatile("" : "+m"(x)); }
TOPG_INLINE void keep(I32& x) { asm volatile("" : "+m"(x)); }

template <class Vector, class Step>
TOPG_INLINE void run_chains(Vector (&sums)[kChains], long iterations, Step step) {
  for (long i = 0; i < iterations; ++i) {
    unroll<kChains>([&](auto chain) TOPG_INLINE_LAMBDA { sums[chain] = step(sums[chain]); });
  }
  asm volatile("" ::"m"(sums) : "memory");
}

inline double peak_float32(long iterations) {
  F32 sums[kChains], a = splat(1.0f), b = splat(0.0f);
  for (F32& sum : sums) sum = zero();
  keep(a), keep(b);
  run_chains(sums, iterations, [&](F32 sum) TOPG_INLINE_LAMBDA { return fma(a, b, sum); });
  return double(iterations) * kChains * kLanes;
}

#if defined(__AMX_INT8__)

// Four products with two tiles on each side, as the kernels multiply.
inline double peak_int8(long iterations) {
  for (long i = 0; i < iterations; ++i) {
    _tile_dpbsud(0, 4, 6);
    _tile_dpbsud(1, 4, 7);
    _tile_dpbsud(2, 5, 6);
    _tile_dpbsud(3, 5, 7);
  }
  return double(iterations) * 4 * 16 * 16 * 64;
}

inline double peak_bfloat16(long iterations) {
  for (long i = 0; i < iterations; ++i) {
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
  return double(iterations) * 4 * 16 * 16 * 32;
}

#else

inline double peak_int8(long iterations) {
  DotSum sums[kChains];
  I32 a = splat(0), b = splat(0);
  for (DotSum& sum : sums) sum = dot_sum(0);
  keep(a), keep(b);
  run_chains(sums, iterations, [&](DotSum sum) TOPG_INLINE_LAMBDA { return dot4(sum, a, b); });
  return double(iterations) * kChains * kLanes * 4;
}

inline double peak_bfloat16(long iterations) {
  F32 sums[kChains];
  I32 a = splat(0), b = splat(0);
  for (F32& sum : sums) sum = zero();
  keep(a), keep(b);
  run_chains(sums, iterations, [&](F32 sum) TOPG_INLINE_LAMBDA { return dot2(sum, a, b); });
  return double(iterations) * kChains * kLanes * 2;
}

#endif

inline void read_all(const uint8_t* data, size_t bytes) {
  constexpr size_t kStep = 8 * 64;
  I32 seen[8];
  for (I32& x : seen) x = splat(0);
  for (size_t at = 0; at + kStep <= bytes; at += kStep) {
    for (int i = 0; i < 8; ++i) seen[i] = seen[i] + load_bytes(data + at + i * 64);
  }
  for (I32& x : seen) keep(x);
}

inline PeakKernels peak_kernels() {
  PeakKernels kernels;
  kernels.int8 = peak_int8;
  kernels.bfloat16 = peak_bfloat16;
  kernels.float32 = peak_float32;
  kernels.read = read_all;
  return kernels;
}

}  // namespace
}  // namespace topg
