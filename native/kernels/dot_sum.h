// Sums of byte products in registers.
#pragma once

#include "kernels/simd.h"

namespace topg {
namespace {

#if defined(__AVX512F__)

// An I32 that dot4 adds to, in a loop.  A type of its own, because GCC copies an __m512i around each dot4: it must be a
// vector of ints all the way.
struct DotSum {
  typedef int Ints __attribute__((vector_size(64)));
  Ints v;
};
TOPG_INLINE DotSum dot_sum(int32_t start) {
  // By way of memory: a broadcast from a general register would take one of the two ports that multiply.
  asm("" : "+m"(start));
  return {(DotSum::Ints)_mm512_set1_epi32(start)};
}
TOPG_INLINE DotSum dot4(DotSum acc, I32 unsigned_bytes, I32 signed_bytes) {
  return {__builtin_ia32_vpdpbusd_v16si(acc.v, (DotSum::Ints)unsigned_bytes.v, (DotSum::Ints)signed_bytes.v)};
}
TOPG_INLINE F32 to_float(DotSum a) { return to_float(I32{(__m512i)a.v}); }

#else

using DotSum = I32;
TOPG_INLINE DotSum dot_sum(int32_t start) { return splat(start); }

#endif

}  // namespace
}  // namespace topg
