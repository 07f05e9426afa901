// Grouped weights times int8 activations: tiles whose sums stay in registers, integers within a group and float32 over the
// groups.  Written against `dot4`; for processors that have it as an instruction, and as the reference of the others.
#pragma once

#include "kernels/dot_sum.h"
#include "kernels/grouped_format.h"

namespace topg {
namespace {

template <class Format, int kRows>
struct DotTile {
  DotSum dots[kRows][2];  // products of the current group, by row and half block

  // Products are of stored codes, which exceed the real ones by kBias: that much is taken off beforehand.
  TOPG_INLINE void start_group(const QuantisedRows& x) {
    unroll<kRows>([&](auto r) TOPG_INLINE_LAMBDA {
      const DotSum start = dot_sum(Format::kBias == 0 ? 0 : -Format::kBias * x.sums[r * x.groups]);
      unroll<2>([&](auto half) TOPG_INLINE_LAMBDA { dots[r][half] = start; });
    });
  }

  // The products of 4 columns: x points at those of row 0.
  TOPG_INLINE void add(I32 first, I32 second, const int8_t* x, ptrdiff_t stride) {
    unroll<kRows>([&](auto r) TOPG_INLINE_LAMBDA {
      const I32 columns = splat_bytes(x + r * stride);
      dots[r][0] = dot4(dots[r][0], first, columns);
      dots[r][1] = dot4(dots[r][1], second, columns);
    });
  }
};

// As TilePrefetch, for a number of lines per step that is known at compile time: no branches between the products.
template <int kLines>
class LinePrefetch {
 public:
  TOPG_INLINE explicit LinePrefetch(const TileArguments& a) : next_(a.prefetch), bytes_(a.prefetch_bytes) {}

  TOPG_INLINE void step() {
    unroll<kLines>([&](auto i) TOPG_INLINE_LAMBDA { prefetch_l2(next_ + i * 64); });
    if constexpr (kLines != 0) next_ += bytes_;
  }

 private:
  const uint8_t* next_;
  ptrdiff_t bytes_;
};

// All inner steps of a group.
template <class Format, int kRows, int kLines>
TOPG_INLINE void add_group(DotTile<Format, kRows>& tile, const uint8_t* codes, const QuantisedRows& x,
                           LinePrefetch<kLines>& prefetch) {
  const int8_t* columns = x.codes;
  const uint8_t* const end = codes + Format::kCodeBytes;
  // One step an iteration: a loop unrolled over the group would run out of registers.
#pragma GCC unroll 1
  for (; codes != end; codes += kStepBytes) {
    const I32 first = load_bytes(codes), second = load_bytes(codes + kHalfBytes);
    prefetch.step();
    if constexpr (Format::kCode == WeightCode::kInt8) {
      tile.add(first, second, columns, x.stride);
      columns += kStepColumns;
    } else {
      prefetch.step();
      tile.add(low_nibbles(first), low_nibbles(second), columns, x.stride);
      tile.add(high_nibbles(first), high_nibbles(second), columns + kStepColumns, x.stride);
      columns += 2 * kStepColumns;
    }
  }
}

// sums += dots * (activation scale * weight scale), then += (activation scale * sum of activations) * minimum.
template <class Format, int kRows>
TOPG_INLINE void add_scaled(F32 (&sums)[kRows][2], const DotTile<Format, kRows>& tile, const uint8_t* scales,
                            const QuantisedRows& x) {
  unroll<2>([&](auto half) TOPG_INLINE_LAMBDA {
    const F32 weight_scales = load_scales<Format::kScale>(scales, half);
    unroll<kRows>([&](auto r) TOPG_INLINE_LAMBDA {
      const F32 scale = splat(x.scales[r * x.groups]) * weight_scales;
      sums[r][half] = fma(to_float(tile.dots[r][half]), scale, sums[r][half]);
    });
  });
  if constexpr (Format::kMinimum) {
    unroll<2>([&](auto half) TOPG_INLINE_LAMBDA {
      const F32 minimums = load_scales<Format::kScale>(scales + Format::kScaleBytes, half);
      unroll<kRows>([&](auto r) TOPG_INLINE_LAMBDA {
        const float scaled_sum = x.scales[r * x.groups] * float(x.sums[r * x.groups]);
        sums[r][half] = fma(splat(scaled_sum), minimums, sums[r][half]);
      });
    });
  }
}

template <class Format, int kRows, int kLines>
[[gnu::noinline]] void grouped_tile(const TileArguments& a) {
  QuantisedRows x(*a.x, a.row);
  LinePrefetch<kLines> prefetch(a);
  const uint8_t* group = a.block;
  F32 sums[kRows][2];
  unroll<kRows>([&](auto r) TOPG_INLINE_LAMBDA { sums[r][0] = sums[r][1] = zero(); });
  for (int left = a.x->groups; left > 0; --left) {
    DotTile<Format, kRows> tile;
    tile.start_group(x);
    add_group<Format, kRows, kLines>(tile, group, x, prefetch);
    add_scaled<Format, kRows>(sums, tile, group + Format::kCodeBytes, x);
    group += Format::kBytes;
    x.next_group(Format::kGroup);
  }
  unroll<kRows>([&](auto r) TOPG_INLINE_LAMBDA {
    store(a.out + r * kBlockChannels, sums[r][0]);
    store(a.out + r * kBlockChannels + kLanes, sums[r][1]);
  });
}

// No format has more than three lines per step.
template <class Format, int kRows>
TOPG_INLINE void grouped_tile_of_rows(const TileArguments& a) {
  switch (a.prefetch == nullptr ? 0 : (a.prefetch_bytes + 63) / 64) {
    case 0: return grouped_tile<Format, kRows, 0>(a);
    case 1: return grouped_tile<Format, kRows, 1>(a);
    case 2: return grouped_tile<Format, kRows, 2>(a);
    default: return grouped_tile<Format, kRows, 3>(a);
  }
}

template <class Format, int kRows>
inline void multiply_grouped(const WeightFormat& format, const TileArguments& a) {
  if (a.rows == kRows) return grouped_tile_of_rows<Format, kRows>(a);
  if constexpr (kRows > 1) multiply_grouped<Format, kRows - 1>(format, a);
}

}  // namespace
}  // namespace topg
