// What the parts of an attention kernel hand to each other: rows of queries, and the tiles of one block of keys.
#pragma once

#include "kernels/kernels.h"
#include "kernels/simd.h"

namespace topg {
namespace {

constexpr int kBlockTiles = kKeyBlock / kTileKeys;
constexpr int kScaleKeys = 64;  // keys of a run: their weights share a scale where they are rounded to 8 bits
constexpr int kStepKeyBytes = 4 * kTileKeys;  // of a tile of keys, what one step multiplies with 4 bytes of a query

// Query rows of a tile: (token, head) pairs one after the other.
struct QueryTile {
  const uint8_t* values;  // [rows][row_bytes]
  const float* scales;    // int8 only
  const int32_t* sums;
  ptrdiff_t row_bytes;
  int rows;
};

// Keys [begin, end) of a block that a row, or any row of several, sees; counted from the block's first.
struct Visible {
  int begin, end;

  bool any() const { return begin < end; }
  bool all(int first, int count) const { return begin <= first && end >= first + count; }
};

inline Visible united(Visible a, Visible b) {
  return {a.begin < b.begin ? a.begin : b.begin, a.end > b.end ? a.end : b.end};
}

TOPG_INLINE Mask visible_lanes(const Visible& visible, int first) {
  return without(first_lanes(visible.end - first), first_lanes(visible.begin - first));
}

// Tiles [first, end) of a block are computed; `first` begins a run.
struct BlockTiles {
  int first = 0, end = 0;
  const uint8_t* keys[kBlockTiles];
  const uint8_t* values[kBlockTiles];
  const float* value_scales = nullptr;  // [kKeyBlock], int8 only; 0 for keys that nobody sees
  bool bad_scales = false;              // one of them is NaN
  // Fetched into L2 meanwhile: the values while keys are multiplied, and what comes after while values are; null: nothing.
  bool fetch_values = false;
  const uint8_t* next_keys[kBlockTiles] = {};

  int first_key() const { return first * kTileKeys; }
  int end_key() const { return end * kTileKeys; }

  void shrink_to(const Visible& visible) {
    first = visible.begin / kScaleKeys * (kScaleKeys / kTileKeys);
    end = (visible.end + kTileKeys - 1) / kTileKeys;
  }
};

// What a block gives for a tile of rows.
struct BlockResult {
  float* out;  // [rows][dim]
  float* maximum;
  float* total;
};

inline const float* key_scales(const KVLayout& kv, const uint8_t* tile) {
  return reinterpret_cast<const float*>(tile + 2 * kv.half_tile_bytes());
}
inline const float* value_scales(const KVLayout& kv, const uint8_t* tile) { return key_scales(kv, tile) + kTileKeys; }

// ---- values without what must not be multiplied --------------------------------------------------------------------------

// The values of a float32 or bfloat16 tile with zeros in place of tokens outside [begin, end): there may be a NaN, and even
// a weight of zero would not silence it.
inline void copy_values(const KVLayout& kv, const uint8_t* from, int begin, int end, uint8_t* to) {
  const int dim = kv.dim(), step_keys = int(sizeof(uint32_t) / kv.element_bytes());
  for (int step = 0; step < kTileKeys / step_keys; ++step, from += dim * 4, to += dim * 4) {
    uint32_t keep = 0;  // bits of a word whose token is seen
    for (int i = 0; i < step_keys; ++i) {
      const int token = step * step_keys + i;
      if (token >= begin && token < end) keep |= step_keys == 1 ? 0xffffffffu : 0xffffu << (16 * i);
    }
    const uint32_t* source = reinterpret_cast<const uint32_t*>(from);
    uint32_t* target = reinterpret_cast<uint32_t*>(to);
    for (int i = 0; i < dim; ++i) target[i] = source[i] & keep;
  }
}

// Memory for the tiles of which some keys are hidden: at most two in part, the others are all zeros.
template <int kElementBytes>
class CleanValues {
 public:
  void apply(const KVLayout& kv, const Visible& visible, BlockTiles& tiles) {
    int copies = 0;
    for (int i = tiles.first; i < tiles.end; ++i) {
      const int begin = visible.begin - i * kTileKeys, end = visible.end - i * kTileKeys;
      if (begin <= 0 && end >= kTileKeys) continue;
      const bool hidden = begin >= kTileKeys || end <= 0;
      uint8_t* copy = hidden ? zeros_ : partial_[copies++];
      copy_values(kv, tiles.values[i], begin, end, copy);
      tiles.values[i] = copy;
    }
  }

 private:
  static constexpr int kBytes = kElementBytes == 0 ? 1 : kTileKeys * kMaxHeadDim * kElementBytes;
  alignas(64) uint8_t zeros_[kBytes];
  alignas(64) uint8_t partial_[2][kBytes];
};

}  // namespace
}  // namespace topg
