// Fetching memory ahead of its use.
#pragma once

#include <cstddef>
#include <cstdint>

namespace topg {

// Brings a range to L2.  In assembly: compilers delete the builtin in loops that do nothing else.
inline void prefetch_range(const uint8_t* data, size_t bytes) {
  constexpr size_t kLine = 64;
  for (size_t at = 0; at < bytes; at += kLine) {
#if defined(__x86_64__)
    asm volatile("prefetcht1 %0" ::"m"(data[at]));
#elif defined(__aarch64__)
    asm volatile("prfm pldl2keep, [%0]" ::"r"(data + at));
#else
    (void)data;
#endif
  }
}

}  // namespace topg
