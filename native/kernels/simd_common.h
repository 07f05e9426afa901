// What the vectors of every instruction set share.
#pragma once

#include <cstddef>
#include <cstdint>

#define TOPG_INLINE inline __attribute__((always_inline))
#define TOPG_INLINE_LAMBDA __attribute__((always_inline))

namespace topg {
namespace {

template <int I>
struct Index {
  static constexpr int value = I;
  constexpr operator int() const { return I; }
};

// function(Index<0>{}), ..., function(Index<N - 1>{}): a loop that leaves arrays of vectors in registers.
// `function` must be a lambda with TOPG_INLINE_LAMBDA.
template <int N, class Function>
TOPG_INLINE void unroll(Function&& function) {
  if constexpr (N > 0) {
    unroll<N - 1>(function);
    function(Index<N - 1>{});
  }
}

// Brings a cache line to L2.  In assembly: GCC deletes the builtin inside small inlined functions.
TOPG_INLINE void prefetch_l2(const void* p) {
#if defined(__x86_64__)
  asm volatile("prefetcht1 %0" ::"m"(*(const char*)p));
#elif defined(__aarch64__)
  asm volatile("prfm pldl2keep, [%0]" ::"r"(p));
#else
  (void)p;
#endif
}

}  // namespace
}  // namespace topg
