// From the arrays of a stored tensor to packed blocks (layout.h).
#pragma once

#include <cstdint>

#include "kernels/layout.h"

namespace topg {

// The arrays a tensor [rows, columns] is stored as, each one contiguous and row after row.
//   plain formats    values [rows, columns]: float32, or the bits of float16 or bfloat16
//   kInt8            values int8 [rows, padded columns]
//   kInt4            values uint8 [rows, padded columns / 2]; byte i holds column 2 i in its low nibble, 2 i + 1 in its high
//                    one.  A nibble n stands for n, without minimums for n - 8
//   scales, minimums [rows, groups] of the format's scale type; null where the format has none
struct StoredWeight {
  const void* values = nullptr;
  const void* scales = nullptr;
  const void* minimums = nullptr;
  int rows = 0;
  int columns = 0;
};

// Packed channels of one source, or of two interleaved ones (a gate and an up projection of the same shape).
constexpr int packed_channels(int rows, int source_count) {
  return source_count == 1 ? rows : round_up(rows, kLanes) * source_count;
}

// Writes blocks [first_block, last_block) of the packed weight whose block 0 is at `out` (64-byte aligned).  Threads may
// share the work by ranges of blocks.  One source: channel c is row c.  Two sources: block b holds rows 16 b .. 16 b + 15
// of source 0, then the same rows of source 1.  Channels without a row are zeros.
void pack_blocks(const WeightFormat& format, const StoredWeight* sources, int source_count, int first_block, int last_block,
                 uint8_t* out);

}  // namespace topg
