// bfloat16 linears with AMX tiles, for any number of rows: other instructions would round differently.
#pragma once

#include <immintrin.h>

#include "kernels/kernels.h"
#include "kernels/simd.h"
#include "kernels/tile_prefetch.h"

namespace topg {
namespace {

constexpr int kAmxTileRows = 16;     // rows of a tile of activations
constexpr int kAmxTileColumns = 32;  // bfloat16 columns of one: 64 bytes
constexpr int kAmxRows = 2 * kAmxTileRows;
constexpr int kAmxPairBytes = 2 * kBlockChannels * sizeof(uint16_t);  // of a block, for a pair of columns
constexpr int kAmxStepBytes = kAmxTileColumns / 2 * kAmxPairBytes;

// 16 rows that a tile is loaded from.
struct AmxRows {
  const uint16_t* values;
  ptrdiff_t stride;  // bytes
};

// Loads of tiles do not tell the compiler which memory they read: keeps stores before, or after, all of them.
TOPG_INLINE void amx_fence() { asm volatile("" ::: "memory"); }

// Tiles always have 16 rows.  Fewer are copied here first, so that no tile reads beyond them; the sums of the others, whatever
// lies there, are thrown away.
template <int kColumns>
struct alignas(64) AmxStage {
  uint16_t values[kAmxTileRows][kColumns];

  AmxRows copy(const AmxRows& from, int rows, int columns) {
    amx_fence();
    for (int r = 0; r < rows; ++r) {
      __builtin_memcpy(values[r], (const char*)from.values + r * from.stride, size_t(columns) * sizeof(uint16_t));
    }
    amx_fence();
    return {values[0], sizeof(values[0])};
  }
};

// Registers 0 to 3 hold sums [row tile][half of the block], 4 and 5 activations, 6 and 7 weights.
template <int kRowTiles>
TOPG_INLINE void amx_clear() {
  _tile_zero(0);
  _tile_zero(1);
  if constexpr (kRowTiles == 2) {
    _tile_zero(2);
    _tile_zero(3);
  }
}

// Adds the products of 32 columns.
template <int kRowTiles>
TOPG_INLINE void amx_add(const AmxRows (&x)[kRowTiles], int column, const uint8_t* weights) {
  _tile_loadd(4, x[0].values + column, x[0].stride);
  _tile_loadd(6, weights, kAmxPairBytes);
  _tile_dpbf16ps(0, 4, 6);
  _tile_loadd(7, weights + kAmxPairBytes / 2, kAmxPairBytes);
  _tile_dpbf16ps(1, 4, 7);
  if constexpr (kRowTiles == 2) {
    _tile_loadd(5, x[1].values + column, x[1].stride);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
}

// The last columns, fewer than 32.
template <int kRowTiles>
void amx_add_rest(const AmxRows (&x)[kRowTiles], int last_rows, int first, int columns, const uint8_t* weights) {
  AmxStage<kAmxTileColumns> stages[kRowTiles] = {};  // zeros after the last column
  alignas(64) uint8_t padded_weights[kAmxStepBytes] = {};
  __builtin_memcpy(padded_weights, weights, size_t(columns) / 2 * kAmxPairBytes);
  AmxRows rest[kRowTiles];
  for (int t = 0; t < kRowTiles; ++t) {
    const AmxRows from = {x[t].values + first, x[t].stride};
    rest[t] = stages[t].copy(from, t + 1 == kRowTiles ? last_rows : kAmxTileRows, columns);
  }
  amx_add(rest, 0, padded_weights);
  amx_fence();
}

// The sums of row tile `kTile` to out [rows][32].
template <int kTile>
TOPG_INLINE void amx_store(float* out, int rows) {
  constexpr int kSumBytes = kBlockChannels * sizeof(float);
  alignas(64) float all[kAmxTileRows][kBlockChannels];
  float* target = rows == kAmxTileRows ? out : all[0];
  if constexpr (kTile == 0) {  // the number of a register must be a literal
    _tile_stored(0, target, kSumBytes);
    _tile_stored(1, target + kLanes, kSumBytes);
  } else {
    _tile_stored(2, target, kSumBytes);
    _tile_stored(3, target + kLanes, kSumBytes);
  }
  if (target != out) __builtin_memcpy(out, all, size_t(rows) * kSumBytes);
}

// The last row tile has `last_rows` rows.
template <int kRowTiles>
void multiply_amx_tiles(const TileArguments& a, int last_rows) {
  constexpr int kLast = kRowTiles - 1, kStageColumns = 8 * kAmxTileColumns;
  const Activations& x = *a.x;
  AmxRows rows[kRowTiles];
  for (int t = 0; t < kRowTiles; ++t) {
    rows[t] = {x.row<uint16_t>(a.row + t * kAmxTileRows), x.stride * ptrdiff_t(sizeof(uint16_t))};
  }
  AmxStage<kStageColumns> stage;
  TilePrefetch prefetch(a);
  const uint8_t* weights = a.block;
  amx_clear<kRowTiles>();
  const int whole = x.columns / kAmxTileColumns * kAmxTileColumns;
  for (int first = 0; first < whole; first += kStageColumns) {
    const int columns = whole - first < kStageColumns ? whole - first : kStageColumns;
    AmxRows chunk[kRowTiles];
    for (int t = 0; t < kRowTiles; ++t) chunk[t] = {rows[t].values + first, rows[t].stride};
    if (last_rows < kAmxTileRows) chunk[kLast] = stage.copy(chunk[kLast], last_rows, columns);
    for (int column = 0; column < columns; column += kAmxTileColumns, weights += kAmxStepBytes) {
      prefetch.step(kAmxTileColumns / kStepColumns);
      amx_add(chunk, column, weights);
    }
  }
  if (whole < x.columns) amx_add_rest(rows, last_rows, whole, x.columns - whole, weights);
  if constexpr (kRowTiles == 2) amx_store<0>(a.out, kAmxTileRows);
  amx_store<kLast>(a.out + kLast * kAmxTileRows * kBlockChannels, last_rows);
}

inline void multiply_bfloat16_amx(const WeightFormat&, const TileArguments& a) {
  if (a.rows <= kAmxTileRows) return multiply_amx_tiles<1>(a, a.rows);
  multiply_amx_tiles<2>(a, a.rows - kAmxTileRows);
}

}  // namespace
}  // namespace topg
