// Grouped int8 weights times int8 activations with AMX tiles, for 8 and more rows; fewer go to grouped_tile.h.  Integer sums
// are exact and float32 ones are made of the same operations in the same order, so both give the same bits.
//
// Groups have 64 columns, what one instruction multiplies.  Shorter ones would leave tiles half empty while scaling, which
// takes most of the time, stays the same: the kernels without tiles are as fast.
#pragma once

#include "kernels/grouped_tile.h"

namespace topg {
namespace {

constexpr int kInt8TileRows = 16;
constexpr int kInt8TileColumns = 64;
constexpr int kInt8MaxRows = 2 * kInt8TileRows;
constexpr int kInt8MinRows = 8;
constexpr int kProductRowBytes = kBlockChannels * sizeof(int32_t);

// Tile instructions do not tell the compiler which memory they read and write.
TOPG_INLINE void tile_fence() { asm volatile("" ::: "memory"); }

// Activations of up to 32 rows as one or two tiles of 16.  Two tiles overlap when the rows are fewer than 32; a tile of fewer
// than 16 is copied, so that nothing beyond its rows is read.
template <int kTiles>
class ActivationTiles {
 public:
  ActivationTiles(const Activations& x, int row, int rows)
      : first_(x.row<int8_t>(row)), last_(first_ + (rows - kInt8TileRows) * x.stride), stride_(x.stride), rows_(rows) {}

  // Columns [column, column + 64) into registers 4 and 5.
  TOPG_INLINE void load_columns(ptrdiff_t column) {
    if constexpr (kTiles == 2) {
      _tile_loadd(4, first_ + column, stride_);
      _tile_loadd(5, last_ + column, stride_);
    } else if (rows_ == kInt8TileRows) {
      _tile_loadd(4, first_ + column, stride_);
    } else {
      for (int r = 0; r < rows_; ++r) {
        _mm512_store_si512(copy_[r], _mm512_loadu_si512(first_ + r * stride_ + column));
      }
      tile_fence();
      _tile_loadd(4, copy_, kInt8TileColumns);
    }
  }

 private:
  const int8_t *first_, *last_;
  ptrdiff_t stride_;
  int rows_;
  alignas(64) int8_t copy_[kTiles == 1 ? kInt8TileRows : 1][kInt8TileColumns];
};

template <class Format, int kTiles>
class AmxTile {
 public:
  static_assert(Format::kCode == WeightCode::kInt8 && Format::kGroup == kInt8TileColumns && !Format::kMinimum);

  explicit AmxTile(const TileArguments& a)
      : activations_(*a.x, a.row, a.rows), x_(*a.x, a.row), block_(a.block), out_(a.out), prefetch_(a),
        groups_(a.x->groups), rows_(a.rows) {}

  // Groups are scaled in pairs, which halves the traffic of the output; the products of the next one are under way meanwhile.
  TOPG_INLINE void run() {
    for (int i = 0; i < rows_ * kBlockChannels; i += kLanes) store(out_ + i, zero());
    start_group(0);
    int group = 0;
    for (; group + 1 < groups_; group += 2) {
      start_group(group + 1);
      start_group(group + 2);
      add_scaled<2>(group);
    }
    if (group == groups_) return;
    start_group(group + 1);
    add_scaled<1>(group);
  }

 private:
  // Registers: 0 to 3 hold products [row tile][half of the block], 4 and 5 activations, 6 and 7 weights.  Stores the products
  // of the group before and starts those of this one, if there is one.  Products take long to compute: each register is
  // stored when the three after it have been started, right before it is used again.
  TOPG_INLINE void start_group(int group) {
    prefetch_.step(Format::kGroup / kStepColumns);
    tile_fence();
    if (group < groups_) {
      const uint8_t* codes = block_ + group * ptrdiff_t(Format::kBytes);
      activations_.load_columns(group * ptrdiff_t(Format::kGroup));
      _tile_loadd(6, codes, kStepBytes);
      _tile_loadd(7, codes + kHalfBytes, kStepBytes);
    }
    int32_t* products = products_[(group + 1) % 2][0];
    _tile_stored(0, products, kProductRowBytes);
    _tile_zero(0);
    _tile_dpbsud(0, 4, 6);
    _tile_stored(1, products + kLanes, kProductRowBytes);
    _tile_zero(1);
    _tile_dpbsud(1, 4, 7);
    if constexpr (kTiles == 2) {
      int32_t* lower = products + kInt8TileRows * kBlockChannels;
      _tile_stored(2, lower, kProductRowBytes);
      _tile_zero(2);
      _tile_dpbsud(2, 5, 6);
      _tile_stored(3, lower + kLanes, kProductRowBytes);
      _tile_zero(3);
      _tile_dpbsud(3, 5, 7);
    }
    tile_fence();
  }

  // Adds kGroups groups from `group`, an even one, to the output: add_scaled of grouped_tile.h, row by row.
  template <int kGroups>
  TOPG_INLINE void add_scaled(int group) {
    F32 weight_scales[kGroups][2];
    unroll<kGroups>([&](auto g) TOPG_INLINE_LAMBDA {
      const uint8_t* scales = block_ + (group + g) * ptrdiff_t(Format::kBytes) + Format::kCodeBytes;
      unroll<2>([&](auto half) TOPG_INLINE_LAMBDA { weight_scales[g][half] = load_scales<Format::kScale>(scales, half); });
    });
    for (int r = 0; r < rows_; ++r) {
      float* out = out_ + r * kBlockChannels;
      // The second tile holds the last 16 rows, some of which the first may hold as well.
      const int product_row = r < kInt8TileRows ? r : r + kInt8MaxRows - rows_;
      F32 sums[2] = {load(out), load(out + kLanes)};
      unroll<kGroups>([&](auto g) TOPG_INLINE_LAMBDA {
        const ptrdiff_t index = r * x_.groups + group + g;
        const I32 start = splat(-Format::kBias * x_.sums[index]);
        unroll<2>([&](auto half) TOPG_INLINE_LAMBDA {
          const I32 dots = load_bytes(products_[g][product_row] + half * kLanes) + start;
          sums[half] = fma(to_float(dots), splat(x_.scales[index]) * weight_scales[g][half], sums[half]);
        });
      });
      store(out, sums[0]);
      store(out + kLanes, sums[1]);
    }
  }

  ActivationTiles<kTiles> activations_;
  const QuantisedRows x_;
  const uint8_t* block_;
  float* out_;
  TilePrefetch prefetch_;
  const int groups_, rows_;
  alignas(64) int32_t products_[2][kTiles * kInt8TileRows][kBlockChannels];  // of an even group and an odd one
};

template <class Format, int kTiles>
[[gnu::noinline]] void grouped_amx_tile(const TileArguments& a) {
  AmxTile<Format, kTiles>(a).run();
}

template <class Format>
void multiply_grouped_amx(const WeightFormat& format, const TileArguments& a) {
  if (a.rows < kInt8MinRows) return multiply_grouped<Format, kInt8MinRows - 1>(format, a);
  if (a.rows <= kInt8TileRows) return grouped_amx_tile<Format, 1>(a);
  grouped_amx_tile<Format, 2>(a);
}

}  // namespace
}  // namespace topg
