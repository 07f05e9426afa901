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
      : next_(arguments.prefetch), lines_(arguments.prefetch != nullptr ? arguments.prefetch_lines : 0) {}

  // What belongs to one inner step, or to several.
  TOPG_INLINE void step(int steps = 1) {
    const uint8_t* end = next_ + ptrdiff_t(steps) * lines_ * 64;
    for (; next_ != end; next_ += 64) prefetch_l2(next_);
  }

 private:
  const uint8_t* next_;
  int lines_;
};

}  // namespace
}  // namespace topg
