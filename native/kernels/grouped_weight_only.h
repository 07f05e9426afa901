// Grouped int8 weights times bfloat16 activations, multiplied as float32.
//
// A group's products are added in ascending order of columns, then the group's sum is scaled and added to the others.
#pragma once

#include "kernels/grouped_format.h"

namespace topg {
namespace {

// Sums of the rows by the group's and by all columns must fit in registers, with a weight a vector and an activation.
#if defined(__AVX512F__)
constexpr int kWeightOnlyRows = 7, kWeightOnlyVectors = 2;
#elif defined(__AVX2__)
constexpr int kWeightOnlyRows = 3, kWeightOnlyVectors = 1;
#else
constexpr int kWeightOnlyRows = 1, kWeightOnlyVectors = 1;
#endif

template <class Format, int kRows>
struct WidenedRows {
  alignas(64) float values[kRows][Format::kGroup];  // of one group

  TOPG_INLINE void load_group(const uint16_t* x, ptrdiff_t stride) {
    for (int r = 0; r < kRows; ++r) {
      for (int k = 0; k < Format::kGroup; k += kLanes) store(values[r] + k, load_bfloat16(x + r * stride + k));
    }
  }
};

// sums += scale * (codes . activations) for one group.
template <class Format, int kRows, int kVectors>
TOPG_INLINE void add_weight_only_group(F32 (&sums)[kRows][kVectors], const WidenedRows<Format, kRows>& x,
                                       const uint8_t* group, int first_half, TilePrefetch& prefetch) {
  F32 products[kRows][kVectors];
  unroll<kRows>([&](auto r) TOPG_INLINE_LAMBDA {
    unroll<kVectors>([&](auto v) TOPG_INLINE_LAMBDA { products[r][v] = zero(); });
  });
#pragma GCC unroll 1
  for (int first = 0; first < Format::kGroup; first += kStepColumns) {
    prefetch.step();
    unroll<kStepColumns>([&](auto i) TOPG_INLINE_LAMBDA {
      F32 weights[kVectors];
      unroll<kVectors>([&](auto v) TOPG_INLINE_LAMBDA {
        weights[v] = load_int8((const int8_t*)group + (first + i) * kBlockChannels + (first_half + v) * kLanes);
      });
      unroll<kRows>([&](auto r) TOPG_INLINE_LAMBDA {
        const F32 activation = splat(x.values[r][first + i]);
        unroll<kVectors>([&](auto v) TOPG_INLINE_LAMBDA {
          products[r][v] = fma(activation, weights[v], products[r][v]);
        });
      });
    });
  }
  unroll<kVectors>([&](auto v) TOPG_INLINE_LAMBDA {
    const F32 scale = load_scales<Format::kScale>(group + Format::kCodeBytes, first_half + v);
    unroll<kRows>([&](auto r) TOPG_INLINE_LAMBDA { sums[r][v] = fma(products[r][v], scale, sums[r][v]); });
  });
}

// Channels of kVectors halves of the block, from `first_half` on.
template <class Format, int kRows, int kVectors>
TOPG_INLINE void weight_only_halves(const TileArguments& a, int first_half, TilePrefetch prefetch) {
  const uint16_t* x = a.x->row<uint16_t>(a.row);
  const uint8_t* group = a.block;
  WidenedRows<Format, kRows> widened;
  F32 sums[kRows][kVectors];
  unroll<kRows>([&](auto r) TOPG_INLINE_LAMBDA {
    unroll<kVectors>([&](auto v) TOPG_INLINE_LAMBDA { sums[r][v] = zero(); });
  });
  for (int left = a.x->columns / Format::kGroup; left > 0; --left) {
    widened.load_group(x, a.x->stride);
    add_weight_only_group<Format, kRows, kVectors>(sums, widened, group, first_half, prefetch);
    x += Format::kGroup;
    group += Format::kBytes;
  }
  unroll<kRows>([&](auto r) TOPG_INLINE_LAMBDA {
    unroll<kVectors>([&](auto v) TOPG_INLINE_LAMBDA {
      store(a.out + r * kBlockChannels + (first_half + v) * kLanes, sums[r][v]);
    });
  });
}

template <class Format, int kRows>
[[gnu::noinline]] void weight_only_tile(const TileArguments& a) {
  constexpr int kHalves = 2;
  TileArguments without_prefetch = a;  // a second pass reads what the first one has read
  without_prefetch.prefetch = nullptr;
  for (int half = 0; half < kHalves; half += kWeightOnlyVectors) {
    weight_only_halves<Format, kRows, kWeightOnlyVectors>(a, half, TilePrefetch(half == 0 ? a : without_prefetch));
  }
}

template <class Format, int kRows = kWeightOnlyRows>
void multiply_weight_only(const WeightFormat& format, const TileArguments& a) {
  if (a.rows == kRows) return weight_only_tile<Format, kRows>(a);
  if constexpr (kRows > 1) multiply_weight_only<Format, kRows - 1>(format, a);
}

}  // namespace
}  // namespace topg
