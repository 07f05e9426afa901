// What happens to a block of results, [rows][32 channels], right after it was multiplied (BlockKernels).
#pragma once

#include "kernels/kernels.h"
#include "kernels/rows.h"
#include "kernels/simd.h"

namespace topg {
namespace {

// function(row, half, result) for both halves of each row, the bias added.
template <class Function>
TOPG_INLINE void for_each_half(const float* c, int rows, const float* bias, Function function) {
  const F32 low = bias != nullptr ? load(bias) : zero(), high = bias != nullptr ? load(bias + kLanes) : zero();
  for (int row = 0; row < rows; ++row, c += kBlockChannels) {
    function(row, 0, load(c) + low);
    function(row, 1, load(c + kLanes) + high);
  }
}

inline void store_block(const float* c, int rows, const float* bias, float* out, ptrdiff_t stride) {
  for_each_half(c, rows, bias, [&](int row, int half, F32 x) TOPG_INLINE_LAMBDA {
    store(out + row * stride + half * kLanes, x);
  });
}

inline void add_block(const float* c, int rows, const float* bias, float* out, ptrdiff_t stride) {
  for_each_half(c, rows, bias, [&](int row, int half, F32 x) TOPG_INLINE_LAMBDA {
    float* target = out + row * stride + half * kLanes;
    store(target, load(target) + x);
  });
}

template <ActivationFunction kFunction>
void activate_block_with(const float* c, int rows, const float* bias, float* out, ptrdiff_t stride) {
  for_each_half(c, rows, bias, [&](int row, int half, F32 x) TOPG_INLINE_LAMBDA {
    store(out + row * stride + half * kLanes, activation<kFunction>(x));
  });
}

template <ActivationFunction kFunction>
void gate_block_with(const float* c, int rows, const float* bias, float* out, ptrdiff_t stride) {
  F32 gate = zero();
  for_each_half(c, rows, bias, [&](int row, int half, F32 x) TOPG_INLINE_LAMBDA {
    if (half == 0) {
      gate = activation<kFunction>(x);
    } else {
      store(out + row * stride, gate * x);
    }
  });
}

inline void activate_block(ActivationFunction function, const float* c, int rows, const float* bias, float* out,
                           ptrdiff_t stride) {
  switch (function) {
    case ActivationFunction::kSilu: return activate_block_with<ActivationFunction::kSilu>(c, rows, bias, out, stride);
    case ActivationFunction::kGelu: return activate_block_with<ActivationFunction::kGelu>(c, rows, bias, out, stride);
    case ActivationFunction::kGeluTanh:
      return activate_block_with<ActivationFunction::kGeluTanh>(c, rows, bias, out, stride);
    case ActivationFunction::kRelu: return activate_block_with<ActivationFunction::kRelu>(c, rows, bias, out, stride);
  }
}

inline void gate_block(ActivationFunction function, const float* c, int rows, const float* bias, float* out,
                       ptrdiff_t stride) {
  switch (function) {
    case ActivationFunction::kSilu: return gate_block_with<ActivationFunction::kSilu>(c, rows, bias, out, stride);
    case ActivationFunction::kGelu: return gate_block_with<ActivationFunction::kGelu>(c, rows, bias, out, stride);
    case ActivationFunction::kGeluTanh: return gate_block_with<ActivationFunction::kGeluTanh>(c, rows, bias, out, stride);
    case ActivationFunction::kRelu: return gate_block_with<ActivationFunction::kRelu>(c, rows, bias, out, stride);
  }
}

inline void best_of_block(const float* c, int rows, int first_channel, int channels, Best* best) {
  const F32 infinity = splat(__builtin_inff());
  for (int row = 0; row < rows; ++row, c += kBlockChannels) {
    // Channels that fill up the last block do not compete.
    const F32 low = select(first_lanes(channels), load(c), zero() - infinity);
    const F32 high = select(first_lanes(channels - kLanes), load(c + kLanes), zero() - infinity);
    const Mask usable = less(low, infinity) & less(high, infinity);  // false for NaN
    if (any(without(first_lanes(kLanes), usable))) best[row].unusable = true;
    if (!any(less(splat(best[row].value), max(low, high)))) continue;
    const float winner = largest(max(low, high));
    const Mask in_low = equal(low, splat(winner)), in_high = equal(high, splat(winner));
    best[row].value = winner;
    best[row].channel = first_channel + (any(in_low) ? first_lane(in_low) : kLanes + first_lane(in_high));
  }
}

inline BlockKernels block_kernels() {
  BlockKernels kernels;
  kernels.store = store_block;
  kernels.add = add_block;
  kernels.activate = activate_block;
  kernels.gate = gate_block;
  kernels.best = best_of_block;
  return kernels;
}

}  // namespace
}  // namespace topg
