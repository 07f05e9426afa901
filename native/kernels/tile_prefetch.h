// What a linear kernel fetches into L2 on its way over the columns: see TileArguments.
#pragma once

#include "kernels/kernels.h"
#include "kernels/simd_common.h"

namespace topg {
namespace {

constexpr int kStepColumns = 4;  // of an inner step

class TilePrefetch {
 public:
  TOPG_INLINE explicit TilePrefetch(const TileArguments& arguments)
      : next_(arguments.prefetch), bytes_(arguments.prefetch != nullptr ? arguments.prefetch_bytes : 0) {}

  // What belongs to one inner step, or to several.  Fetching a line again costs next to nothing.
  TOPG_INLINE void step(int steps = 1) {
    const uint8_t* end = next_ + ptrdiff_t(steps) * bytes_;
    for (const uint8_t* line = next_; line < end; line += 64) prefetch_l2(line);
    next_ = end;
  }

 private:
  const uint8_t* next_;
  ptrdiff_t bytes_;
};

}  // namespace
}  // namespace topg
