// What the kernels of grouped weights know about a format at compile time.
#pragma once

#include "kernels/kernels.h"
#include "kernels/simd.h"
#include "kernels/tile_prefetch.h"

namespace topg {
namespace {

constexpr int kHalfBytes = 64;        // of one vector's 16 channels by 4 bytes of codes
constexpr int kStepBytes = 2 * kHalfBytes;

// A grouped WeightFormat (layout.h) with its numbers as constants.
template <WeightCode kCodeType, ScaleType kScaleType, int kGroupColumns, bool kHasMinimum>
struct GroupedFormat {
  static constexpr WeightCode kCode = kCodeType;
  static constexpr ScaleType kScale = kScaleType;
  static constexpr int kGroup = kGroupColumns;
  static constexpr bool kMinimum = kHasMinimum;

  static constexpr int kCodeBytes = kGroup * kBlockChannels / (kCode == WeightCode::kInt4 ? 2 : 1);
  static constexpr int kScaleBytes = kBlockChannels * scale_bytes(kScale);
  static constexpr int kBytes = kCodeBytes + kScaleBytes * (kMinimum ? 2 : 1);
  // What a stored code exceeds the code it stands for by.
  static constexpr int kBias = kCode == WeightCode::kInt8 ? 128 : kMinimum ? 0 : 8;

  static constexpr WeightFormat format(ActivationCode activation) {
    return {kCode, activation, kScale, kGroup, kMinimum};
  }
};

// 16 scales or minimums: those of the block's first or second half.
template <ScaleType kType>
TOPG_INLINE F32 load_scales(const uint8_t* p, int half) {
  p += half * kLanes * scale_bytes(kType);
  if constexpr (kType == ScaleType::kFloat32) return load((const float*)p);
  if constexpr (kType == ScaleType::kFloat16) return load_float16((const uint16_t*)p);
  return load_bfloat16((const uint16_t*)p);
}

// The int8 activations of a tile's rows, from the group on that comes next.
struct QuantisedRows {
  const int8_t* codes;
  ptrdiff_t stride;
  const float* scales;  // of row r: scales[r * groups]
  const int32_t* sums;
  ptrdiff_t groups;

  TOPG_INLINE QuantisedRows(const Activations& x, int row)
      : codes(x.row<int8_t>(row)), stride(x.stride), scales(x.scales + ptrdiff_t(row) * x.groups),
        sums(x.sums + ptrdiff_t(row) * x.groups), groups(x.groups) {}

  TOPG_INLINE void next_group(int columns) {
    codes += columns;
    scales += 1;
    sums += 1;
  }
};

}  // namespace
}  // namespace topg
