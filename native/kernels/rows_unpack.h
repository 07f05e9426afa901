// One row of a packed weight as float32 (RowKernels::unpack_row): what an embedding looks up.
#pragma once

#include "kernels/kernels.h"
#include "kernels/rows_prepare.h"
#include "kernels/simd.h"

namespace topg {
namespace {

// A channel of a packed block.
struct Channel {
  const uint8_t* block;
  int half, lane;  // which of the block's two vectors, and where in it
};

TOPG_INLINE float scale_of(ScaleType type, const uint8_t* scales, const Channel& channel) {
  const uint8_t* vector = scales + size_t(channel.half) * kLanes * scale_bytes(type);
  float lanes[kLanes];
  store(lanes, type == ScaleType::kFloat32    ? load((const float*)vector)
               : type == ScaleType::kFloat16 ? load_float16((const uint16_t*)vector)
                                             : load_bfloat16((const uint16_t*)vector));
  return lanes[channel.lane];
}

// The code of column `k` of a group.
TOPG_INLINE int8_t code_of(const WeightFormat& format, const uint8_t* codes, const Channel& channel, int k) {
  if (format.code == WeightCode::kInt4) {
    const uint8_t pair = codes[(k / 8 * 2 + channel.half) * 64 + channel.lane * 4 + k % 4];
    const int nibble = k % 8 < 4 ? pair & 15 : pair >> 4;
    return int8_t(format.minimum ? nibble : nibble - 8);
  }
  if (format.activation == ActivationCode::kInt8) {
    return int8_t(codes[(k / 4 * 2 + channel.half) * 64 + channel.lane * 4 + k % 4] - 128);
  }
  return int8_t(codes[k * kBlockChannels + channel.half * kLanes + channel.lane]);
}

// Columns [first, first + 16) of a grouped weight; they lie in one group.
TOPG_INLINE F32 unpack_codes(const WeightFormat& format, const Channel& channel, int first) {
  const uint8_t* group = channel.block + size_t(first / format.group) * group_bytes(format);
  int8_t codes[kLanes];
  for (int i = 0; i < kLanes; ++i) codes[i] = code_of(format, group, channel, first % format.group + i);
  const size_t scales_bytes = size_t(kBlockChannels) * scale_bytes(format.scale);
  const uint8_t* scales = group + group_bytes(format) - scales_bytes * (format.minimum ? 2 : 1);
  const F32 values = load_int8(codes) * splat(scale_of(format.scale, scales, channel));
  return format.minimum ? values + splat(scale_of(format.scale, scales + scales_bytes, channel)) : values;
}

// Columns [first, first + count) of a plain weight, zeros after them.
TOPG_INLINE F32 unpack_plain(WeightCode code, const Channel& channel, int first, int count) {
  float floats[kLanes] = {};
  uint16_t halves[kLanes] = {};
  const int in_row = channel.half * kLanes + channel.lane;
  for (int i = 0; i < count; ++i) {
    const size_t k = size_t(first + i);
    if (code == WeightCode::kFloat32) {
      floats[i] = ((const float*)channel.block)[k * kBlockChannels + in_row];
    } else if (code == WeightCode::kFloat16) {
      halves[i] = ((const uint16_t*)channel.block)[k * kBlockChannels + in_row];
    } else {
      halves[i] = ((const uint16_t*)channel.block)[k / 2 * (2 * kBlockChannels) + in_row * 2 + k % 2];
    }
  }
  return code == WeightCode::kFloat32   ? load(floats)
         : code == WeightCode::kFloat16 ? load_float16(halves)
                                        : load_bfloat16(halves);
}

inline void unpack_row(const PackedWeight& weight, int channel_index, float* out) {
  const int in_block = channel_index % kBlockChannels;
  const Channel channel = {weight.block(channel_index / kBlockChannels), in_block / kLanes, in_block % kLanes};
  const int padded = padded_columns(weight.format, weight.columns);
  for (int first = 0; first < weight.columns; first += kRotationGroup) {
    F32 values[kRunVectors];
    for (int i = 0; i < kRunVectors; ++i) {
      const int column = first + i * kLanes, left = padded - column;
      values[i] = left <= 0                  ? zero()
                  : weight.format.grouped() ? unpack_codes(weight.format, channel, column)
                                            : unpack_plain(weight.format.code, channel, column, left < kLanes ? left : kLanes);
    }
    if (weight.rotated) rotate_run(values);
    for (int i = 0; i < kRunVectors; ++i) {
      const int column = first + i * kLanes, left = weight.columns - column;
      if (left > 0) store_first(out + column, values[i], left < kLanes ? left : kLanes);
    }
  }
}

}  // namespace
}  // namespace topg
