// One block of keys against a tile of query rows: scores, softmax, weighted values.  One policy for each type of cache.
#pragma once

#include "kernels/kernels.h"
#include "kernels/simd.h"
#include "kernels/vector_math.h"

namespace topg {
namespace {

#if defined(__AVX512F__)
constexpr int kQueryRows = 6;  // with two vectors of keys each, or four of values, their sums stay in registers
#else
constexpr int kQueryRows = 2;
#endif
constexpr int kBlockTiles = kKeyBlock / kTileKeys;
constexpr int kValueVectors = 4;  // values of a pass

// Query rows of a tile: (token, head) pairs one after the other.
struct QueryTile {
  const uint8_t* values;  // [rows][dim]
  const float* scales;    // int8 only
  const int32_t* sums;
};

// Keys of a block that a row sees: [begin, end) from the block's first.
struct Visible {
  int begin, end;
};

// What a block gives for a tile of rows.
struct BlockResult {
  float* out;  // [rows][dim]
  float* maximum;
  float* total;
};

// The block's tiles, null after the last one in use.
struct BlockTiles {
  const uint8_t* tile[kBlockTiles];
  int count;
};

TOPG_INLINE Mask visible_lanes(const Visible& visible, int first) {
  return without(first_lanes(visible.end - first), first_lanes(visible.begin - first));
}

// ---- scores -------------------------------------------------------------------------------------------------------------

struct Float32Cache {
  template <int R>
  static TOPG_INLINE void scores(const KVLayout& kv, const QueryTile& q, const uint8_t* tile, float* out) {
    const int dim = kv.dim();
    const float* query = reinterpret_cast<const float*>(q.values);
    const float* keys = reinterpret_cast<const float*>(tile);
    F32 sums[R][2];
    for (int r = 0; r < R; ++r) sums[r][0] = sums[r][1] = zero();
    for (int k = 0; k < dim; ++k) {
      const F32 low = load(keys + k * kTileKeys), high = load(keys + k * kTileKeys + kLanes);
      prefetch_l2(tile + kv.half_tile_bytes() + size_t(k) * kTileKeys * sizeof(float));
      for (int r = 0; r < R; ++r) {
        const F32 x = splat(query[r * dim + k]);
        sums[r][0] = fma(x, low, sums[r][0]);
        sums[r][1] = fma(x, high, sums[r][1]);
      }
    }
    for (int r = 0; r < R; ++r) store(out + r * kKeyBlock, sums[r][0]), store(out + r * kKeyBlock + kLanes, sums[r][1]);
  }

  struct Weights {
    alignas(64) float p[kQueryRows][kKeyBlock];
  };

  // Weights of a row from its scores, relative to `maximum`; returns their sum.
  static TOPG_INLINE float weigh(const KVLayout&, const float* scores, const Visible& visible, float maximum,
                                 const BlockTiles& tiles, int row, Weights& weights) {
    F32 total = zero();
    for (int i = 0; i < tiles.count * kTileKeys; i += kLanes) {
      const F32 p = select(visible_lanes(visible, i), exp2(load(scores + i) - splat(maximum)), zero());
      store(weights.p[row] + i, p);
      total = total + p;
    }
    return sum(total);
  }

  // Vectors [first, first + V) of the weighted sums of values.
  template <int R, int V>
  static TOPG_INLINE void values(const KVLayout& kv, const Weights& weights, const BlockTiles& tiles, int keys, int first,
                                 float* out) {
    const int dim = kv.dim();
    F32 sums[R][V];
    for (int r = 0; r < R; ++r) for (int v = 0; v < V; ++v) sums[r][v] = zero();
    for (int key = 0; key < keys; ++key) {
      const float* value = reinterpret_cast<const float*>(tiles.tile[key / kTileKeys] + kv.half_tile_bytes()) +
                           ptrdiff_t(key % kTileKeys) * dim + first * kLanes;
      F32 b[V];
      for (int v = 0; v < V; ++v) b[v] = load(value + v * kLanes);
      for (int r = 0; r < R; ++r) {
        const F32 p = splat(weights.p[r][key]);
        for (int v = 0; v < V; ++v) sums[r][v] = fma(p, b[v], sums[r][v]);
      }
    }
    for (int r = 0; r < R; ++r) for (int v = 0; v < V; ++v) store(out + r * dim + (first + v) * kLanes, sums[r][v]);
  }
};

struct BFloat16Cache {
  template <int R>
  static TOPG_INLINE void scores(const KVLayout& kv, const QueryTile& q, const uint8_t* tile, float* out) {
    const int dim = kv.dim(), stride = dim * 2;
    F32 sums[R][2];
    for (int r = 0; r < R; ++r) sums[r][0] = sums[r][1] = zero();
    const uint8_t* keys = tile;
    const uint8_t* query = q.values;
    for (int k = 0; k < dim / 2; ++k, keys += 128, query += 4) {
      const I32 low = load_bytes(keys), high = load_bytes(keys + 64);
      prefetch_l2(keys + kv.half_tile_bytes());
      prefetch_l2(keys + kv.half_tile_bytes() + 64);
      for (int r = 0; r < R; ++r) {
        const I32 x = splat_bytes(query + r * stride);
        sums[r][0] = dot2(sums[r][0], low, x);
        sums[r][1] = dot2(sums[r][1], high, x);
      }
    }
    for (int r = 0; r < R; ++r) store(out + r * kKeyBlock, sums[r][0]), store(out + r * kKeyBlock + kLanes, sums[r][1]);
  }

  struct Weights {
    alignas(64) uint16_t p[kQueryRows][kKeyBlock];
  };

  // The sum is that of the rounded weights: they are what the values are multiplied with.
  static TOPG_INLINE float weigh(const KVLayout&, const float* scores, const Visible& visible, float maximum,
                                 const BlockTiles& tiles, int row, Weights& weights) {
    F32 total = zero();
    for (int i = 0; i < tiles.count * kTileKeys; i += kLanes) {
      const F32 p = select(visible_lanes(visible, i), exp2(load(scores + i) - splat(maximum)), zero());
      store_bfloat16(weights.p[row] + i, p);
      total = total + load_bfloat16(weights.p[row] + i);
    }
    return sum(total);
  }

  template <int R, int V>
  static TOPG_INLINE void values(const KVLayout& kv, const Weights& weights, const BlockTiles& tiles, int keys, int first,
                                 float* out) {
    const int dim = kv.dim();
    F32 sums[R][V];
    for (int r = 0; r < R; ++r) for (int v = 0; v < V; ++v) sums[r][v] = zero();
    for (int key = 0; key < keys; key += kTileKeys) {
      const uint8_t* value = tiles.tile[key / kTileKeys] + kv.half_tile_bytes() + first * 64;
      const int pairs = (keys - key < kTileKeys ? keys - key + 1 : kTileKeys) / 2;
      const uint8_t* p = reinterpret_cast<const uint8_t*>(weights.p[0] + key);
      for (int pair = 0; pair < pairs; ++pair, value += dim * 4, p += 4) {
        I32 b[V];
        for (int v = 0; v < V; ++v) b[v] = load_bytes(value + v * 64);
        for (int r = 0; r < R; ++r) {
          const I32 x = splat_bytes(p + r * kKeyBlock * 2);
          for (int v = 0; v < V; ++v) sums[r][v] = dot2(sums[r][v], b[v], x);
        }
      }
    }
    for (int r = 0; r < R; ++r) for (int v = 0; v < V; ++v) store(out + r * dim + (first + v) * kLanes, sums[r][v]);
  }
};

// Scores are exact int32 dot products; the weights of every 64 keys are rounded to 8 bits, with the values' scales in them.
struct Int8Cache {
  static constexpr int kScaleKeys = 64;

  template <int R>
  static TOPG_INLINE void scores(const KVLayout& kv, const QueryTile& q, const uint8_t* tile, float* out) {
    const int dim = kv.dim();
    I32 sums[R][2];
    for (int r = 0; r < R; ++r) sums[r][0] = sums[r][1] = splat(-128 * q.sums[r]);  // keys are stored with 128 added
    const uint8_t* keys = tile;
    const uint8_t* query = q.values;
    for (int k = 0; k < dim / 4; ++k, keys += 128, query += 4) {
      const I32 low = load_bytes(keys), high = load_bytes(keys + 64);
      prefetch_l2(keys + kv.half_tile_bytes());
      prefetch_l2(keys + kv.half_tile_bytes() + 64);
      for (int r = 0; r < R; ++r) {
        const I32 x = splat_bytes(query + r * dim);
        sums[r][0] = dot4(sums[r][0], low, x);
        sums[r][1] = dot4(sums[r][1], high, x);
      }
    }
    const float* scales = reinterpret_cast<const float*>(tile + 2 * kv.half_tile_bytes());
    const F32 low = load(scales), high = load(scales + kLanes);
    for (int r = 0; r < R; ++r) {
      const F32 scale = splat(q.scales[r]);
      store(out + r * kKeyBlock, to_float(sums[r][0]) * (low * scale));
      store(out + r * kKeyBlock + kLanes, to_float(sums[r][1]) * (high * scale));
    }
  }

  struct Weights {
    alignas(64) uint8_t p[kQueryRows][kKeyBlock];
    float scales[kQueryRows][kKeyBlock / kScaleKeys];
  };

  static TOPG_INLINE float weigh(const KVLayout& kv, const float* scores, const Visible& visible, float maximum,
                                 const BlockTiles& tiles, int row, Weights& weights) {
    F32 total = zero();
    for (int first = 0; first < tiles.count * kTileKeys; first += kScaleKeys) {
      F32 weighted[4], peak = zero();
      for (int v = 0; v < 4; ++v) {
        const int key = first + v * kLanes;
        weighted[v] = zero();
        if (key >= tiles.count * kTileKeys) continue;
        const Mask seen = visible_lanes(visible, key);
        const F32 p = select(seen, exp2(load(scores + key) - splat(maximum)), zero());
        const uint8_t* tile = tiles.tile[key / kTileKeys];
        const float* value_scales = reinterpret_cast<const float*>(tile + 2 * kv.half_tile_bytes()) + kTileKeys;
        weighted[v] = select(seen, p * load(value_scales + key % kTileKeys), zero());
        total = total + p;
        total = total + (weighted[v] - weighted[v]);  // a scale that is NaN shows in the sum
        peak = max(peak, weighted[v]);
      }
      const float most = largest(peak);
      const float factor = most > 0x1p-100f ? 255 / most : 0;
      weights.scales[row][first / kScaleKeys] = most > 0x1p-100f ? most / 255 : 0;
      for (int v = 0; v < 4; ++v) {
        store_uint8(weights.p[row] + first + v * kLanes, to_int(weighted[v] * splat(factor)));
      }
    }
    return sum(total);
  }

  template <int R, int V>
  static TOPG_INLINE void values(const KVLayout& kv, const Weights& weights, const BlockTiles& tiles, int keys, int first,
                                 float* out) {
    const int dim = kv.dim();
    for (int from = 0; from < keys; from += kScaleKeys) {
      I32 sums[R][V];
      for (int r = 0; r < R; ++r) for (int v = 0; v < V; ++v) sums[r][v] = splat(0);
      for (int key = from; key < keys && key < from + kScaleKeys; key += kTileKeys) {
        const uint8_t* value = tiles.tile[key / kTileKeys] + kv.half_tile_bytes() + first * 64;
        const int quads = (keys - key < kTileKeys ? keys - key + 3 : kTileKeys) / 4;
        const uint8_t* p = weights.p[0] + key;
        for (int quad = 0; quad < quads; ++quad, value += dim * 4, p += 4) {
          I32 b[V];
          for (int v = 0; v < V; ++v) b[v] = load_bytes(value + v * 64);
          for (int r = 0; r < R; ++r) {
            const I32 x = splat_bytes(p + r * kKeyBlock);
            for (int v = 0; v < V; ++v) sums[r][v] = dot4(sums[r][v], x, b[v]);
          }
        }
      }
      for (int r = 0; r < R; ++r) {
        const F32 scale = splat(weights.scales[r][from / kScaleKeys]);
        for (int v = 0; v < V; ++v) {
          float* place = out + r * dim + (first + v) * kLanes;
          const F32 before = from == 0 ? zero() : load(place);
          store(place, fma(to_float(sums[r][v]), scale, before));
        }
      }
    }
  }
};

// ---- a block ------------------------------------------------------------------------------------------------------------

// Scores become exponents of two; a soft cap bounds them first.
inline void cap_scores(float* scores, int count, float softcap) {
  for (int i = 0; i < count; i += kLanes) {
    store(scores + i, splat(softcap * 1.44269504f) * tanh(load(scores + i) * splat(1 / softcap)));
  }
}

inline float largest_visible(const float* scores, const Visible& visible, int count) {
  const F32 lowest = splat(-__builtin_inff());
  F32 most = lowest;
  for (int i = 0; i < count; i += kLanes) most = max(most, select(visible_lanes(visible, i), load(scores + i), lowest));
  return largest(most);
}

template <class Cache, int R, int V>
TOPG_INLINE void value_passes(const KVLayout& kv, const typename Cache::Weights& weights, const BlockTiles& tiles, int keys,
                              int& first, float* out) {
  for (; first + V <= kv.dim() / kLanes; first += V) Cache::template values<R, V>(kv, weights, tiles, keys, first, out);
}

// `keys`: of the block's keys, how many any row sees, from the first.
template <class Cache, int R>
__attribute__((noinline)) void attend_block(const AttentionShape& shape, const QueryTile& q, const BlockTiles& tiles,
                                            int keys, const Visible* visible, const BlockResult& result) {
  const KVLayout& kv = shape.kv;
  alignas(64) float scores[R * kKeyBlock];
  typename Cache::Weights weights;
  for (int i = 0; i < tiles.count; ++i) Cache::template scores<R>(kv, q, tiles.tile[i], scores + i * kTileKeys);
  const int count = tiles.count * kTileKeys;
  for (int r = 0; r < R; ++r) {
    float* row = scores + r * kKeyBlock;
    if (shape.softcap != 0) cap_scores(row, count, shape.softcap);
    result.maximum[r] = largest_visible(row, visible[r], count);
    result.total[r] = Cache::weigh(kv, row, visible[r], result.maximum[r], tiles, r, weights);
  }
  int first = 0;
  value_passes<Cache, R, kValueVectors>(kv, weights, tiles, keys, first, result.out);
  value_passes<Cache, R, 2>(kv, weights, tiles, keys, first, result.out);
  value_passes<Cache, R, 1>(kv, weights, tiles, keys, first, result.out);
}

}  // namespace
}  // namespace topg
