// One block of keys against a tile of query rows: scores, softmax, weighted values.  One policy for each type of cache.
#pragma once

#include "kernels/attention_softmax.h"
#include "kernels/attention_tiles.h"
#include "kernels/dot_sum.h"
#include "kernels/kernels.h"
#include "kernels/simd.h"

namespace topg {
namespace {

#if defined(__AVX512F__)
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr int kQueryRows = 2;  // checks in the unrolled loops of more take compilers minutes
#else
constexpr int kQueryRows = 6;  // with four vectors of keys or of values, their sums stay in registers
#endif
constexpr int kScoreTiles = 2;  // of keys at a time
constexpr int kValueVectors = 4;
#else
constexpr int kQueryRows = 2;
constexpr int kScoreTiles = 1;
constexpr int kValueVectors = 2;
#endif

// function(Index<rows>{}) for rows of 1 .. kQueryRows.
template <int R = kQueryRows, class Function>
TOPG_INLINE void with_rows(int rows, Function&& function) {
  if constexpr (R > 1) {
    if (rows < R) return with_rows<R - 1>(rows, function);
  }
  function(Index<R>{});
}

// function(row, vector) for each of the sums of a tile.
template <int R, int V, class Function>
TOPG_INLINE void for_each_sum(Function&& function) {
  unroll<R>([&](auto r) TOPG_INLINE_LAMBDA { unroll<V>([&](auto v) TOPG_INLINE_LAMBDA { function(r, v); }); });
}

// ---- caches -------------------------------------------------------------------------------------------------------------
//
// A step multiplies 4 bytes of a query, or of a row's weights, with vectors of 16 times 4 bytes: one float32, two bfloat16 or
// four int8.

struct Float32Cache {
  using Sum = F32;
  static constexpr int kStepKeys = 1;  // of values
  static constexpr int kRunTiles = kBlockTiles;

  struct Weights {
    alignas(64) float p[kQueryRows][kKeyBlock];
    const uint8_t* row(int r) const { return reinterpret_cast<const uint8_t*>(p[r]); }
  };

  static TOPG_INLINE Sum score_start(const QueryTile&, int) { return zero(); }
  static TOPG_INLINE Sum add_key(Sum sum, I32 keys, I32 query) { return fma(from_bits(keys), from_bits(query), sum); }
  static TOPG_INLINE F32 score(Sum sum, const KVLayout&, const QueryTile&, int, const uint8_t*, int) { return sum; }

  template <class AnyWeights>
  static float weigh(const float* scores, const Visible&, float maximum, const BlockTiles& tiles, int row, AnyWeights& weights) {
    return weigh_floats(scores, tiles, maximum, weights.p[row]);
  }

  static TOPG_INLINE Sum value_start() { return zero(); }
  static TOPG_INLINE Sum add_value(Sum sum, I32 values, I32 weights) { return fma(from_bits(values), from_bits(weights), sum); }
  static TOPG_INLINE void store_run(float* out, Sum sum, const Weights&, int, int, const BlockTiles&) { store(out, sum); }
};

struct BFloat16Cache {
  using Sum = F32;
  static constexpr int kStepKeys = 2;
  static constexpr int kRunTiles = kBlockTiles;

  struct Weights {
    alignas(64) uint16_t p[kQueryRows][kKeyBlock];
    const uint8_t* row(int r) const { return reinterpret_cast<const uint8_t*>(p[r]); }
  };

  static TOPG_INLINE Sum score_start(const QueryTile&, int) { return zero(); }
  static TOPG_INLINE Sum add_key(Sum sum, I32 keys, I32 query) { return dot2(sum, keys, query); }
  static TOPG_INLINE F32 score(Sum sum, const KVLayout&, const QueryTile&, int, const uint8_t*, int) { return sum; }

  template <class AnyWeights>
  static float weigh(const float* scores, const Visible&, float maximum, const BlockTiles& tiles, int row, AnyWeights& weights) {
    return weigh_bfloat16(scores, tiles, maximum, weights.p[row]);
  }

  static TOPG_INLINE Sum value_start() { return zero(); }
  static TOPG_INLINE Sum add_value(Sum sum, I32 values, I32 weights) { return dot2(sum, values, weights); }
  static TOPG_INLINE void store_run(float* out, Sum sum, const Weights&, int, int, const BlockTiles&) { store(out, sum); }
};

// Scores are exact int32 dot products; the weights of a run are rounded to 8 bits, with the values' scales in them.
struct Int8Cache {
  using Sum = DotSum;
  static constexpr int kStepKeys = 4;
  static constexpr int kRunTiles = kScaleKeys / kTileKeys;

  struct Weights {
    static constexpr int kTileBytes = kTileKeys, kTileOffset = 0;  // where a tile's weights lie
    alignas(64) uint8_t p[kQueryRows][kKeyBlock];
    float scales[kQueryRows][kKeyBlock / kScaleKeys];
    const uint8_t* row(int r) const { return p[r]; }
  };

  // Keys are stored with 128 added.
  static TOPG_INLINE Sum score_start(const QueryTile& q, int r) { return dot_sum(-128 * q.sums[r]); }
  static TOPG_INLINE Sum add_key(Sum sum, I32 keys, I32 query) { return dot4(sum, keys, query); }
  static TOPG_INLINE F32 score(Sum sum, const KVLayout& kv, const QueryTile& q, int r, const uint8_t* tile, int half) {
    return to_float(sum) * (load(key_scales(kv, tile) + half * kLanes) * splat(q.scales[r]));
  }

  template <class AnyWeights>
  static float weigh(const float* scores, const Visible& visible, float maximum, const BlockTiles& tiles, int row,
                     AnyWeights& weights) {
    const int first = tiles.first_key();
    const float* value_scales = tiles.value_scales;
    float usable[kKeyBlock];
    if (tiles.bad_scales && !seen_scales(value_scales, visible, tiles, usable)) return __builtin_nanf("");
    if (tiles.bad_scales) value_scales = usable;
    const ByteWeights out = {weights.p[row] + tiles.first * AnyWeights::kTileBytes + AnyWeights::kTileOffset,
                             AnyWeights::kTileBytes, weights.scales[row] + first / kScaleKeys};
    switch ((tiles.end_key() - first + kScaleKeys - 1) / kScaleKeys) {
      case 1: return weigh_bytes<1>(scores + first, maximum, value_scales + first, out);
      case 2: return weigh_bytes<2>(scores + first, maximum, value_scales + first, out);
      case 3: return weigh_bytes<3>(scores + first, maximum, value_scales + first, out);
      default: return weigh_bytes<4>(scores + first, maximum, value_scales + first, out);
    }
  }

  static TOPG_INLINE Sum value_start() { return dot_sum(0); }
  static TOPG_INLINE Sum add_value(Sum sum, I32 values, I32 weights) { return dot4(sum, weights, values); }
  static TOPG_INLINE void store_run(float* out, Sum sum, const Weights& weights, int r, int run, const BlockTiles& tiles) {
    const F32 scale = splat(weights.scales[r][run]);
    store(out, run == tiles.first / kRunTiles ? to_float(sum) * scale : fma(to_float(sum), scale, load(out)));
  }

 private:
  // Scales of the keys that a row sees, zeros for others; false if one of them is NaN.
  static bool seen_scales(const float* scales, const Visible& visible, const BlockTiles& tiles, float* out) {
    bool usable = true;
    for (int key = tiles.first_key(); key < kKeyBlock; ++key) {
      const bool seen = key >= visible.begin && key < visible.end;
      out[key] = seen ? scales[key] : 0;
      usable = usable && out[key] == out[key];
    }
    return usable;
  }
};

// ---- scores -------------------------------------------------------------------------------------------------------------

// R rows against T tiles side by side, the first of them `tile`.
template <class Cache, int R, int T>
TOPG_INLINE void score_tiles(const KVLayout& kv, const QueryTile& q, const BlockTiles& tiles, int tile, float* out) {
  const uint8_t* keys[T];
  const uint8_t* values[T];
  unroll<T>([&](auto t) TOPG_INLINE_LAMBDA { keys[t] = tiles.keys[tile + t], values[t] = tiles.values[tile + t]; });
  typename Cache::Sum sums[R][2 * T];
  for_each_sum<R, 2 * T>([&](auto r, auto v) TOPG_INLINE_LAMBDA { sums[r][v] = Cache::score_start(q, r); });
  const uint8_t* query = q.values;
  const ptrdiff_t bytes = ptrdiff_t(kv.half_tile_bytes());
#pragma GCC unroll 1
  for (ptrdiff_t at = 0; at < bytes; at += kStepKeyBytes, query += 4) {
    I32 b[2 * T];
    unroll<2 * T>([&](auto v) TOPG_INLINE_LAMBDA { b[v] = load_bytes(keys[v / 2] + at + v % 2 * 64); });
    if (tiles.fetch_values) {
      unroll<2 * T>([&](auto v) TOPG_INLINE_LAMBDA { prefetch_l2(values[v / 2] + at + v % 2 * 64); });
    }
    unroll<R>([&](auto r) TOPG_INLINE_LAMBDA {
      const I32 x = splat_bytes(query + r * q.row_bytes);
      unroll<2 * T>([&](auto v) TOPG_INLINE_LAMBDA { sums[r][v] = Cache::add_key(sums[r][v], b[v], x); });
    });
  }
  for_each_sum<R, 2 * T>([&](auto r, auto v) TOPG_INLINE_LAMBDA {
    store(out + r * kKeyBlock + v * kLanes, Cache::score(sums[r][v], kv, q, r, keys[v / 2], v % 2));
  });
}

template <class Cache, int R>
[[gnu::noinline]] void score_block(const KVLayout& kv, const QueryTile& q, const BlockTiles& tiles, float* out) {
  int tile = tiles.first;
  for (; tile + kScoreTiles <= tiles.end; tile += kScoreTiles) {
    score_tiles<Cache, R, kScoreTiles>(kv, q, tiles, tile, out + tile * kTileKeys);
  }
  for (; tile < tiles.end; ++tile) score_tiles<Cache, R, 1>(kv, q, tiles, tile, out + tile * kTileKeys);
}

// ---- values -------------------------------------------------------------------------------------------------------------

// Adds the weighted values of tile `tile` to sums, from its vector `first` on.
template <class Cache, int R, int V>
TOPG_INLINE void add_values(const KVLayout& kv, const typename Cache::Weights& weights, const BlockTiles& tiles, int tile,
                            int first, typename Cache::Sum (&sums)[R][V]) {
  constexpr int kSteps = kTileKeys / Cache::kStepKeys;
  const uint8_t* value = tiles.values[tile] + first * 64;
  const uint8_t* p = weights.row(0) + tile * kSteps * 4;
  const ptrdiff_t step_bytes = kv.dim() * 4;
  const bool fetch = tiles.next_keys[tile] != nullptr;
  const ptrdiff_t ahead = tiles.next_keys[tile] - tiles.values[tile];
#pragma GCC unroll 1
  for (int step = 0; step < kSteps; ++step, value += step_bytes, p += 4) {
    I32 b[V];
    unroll<V>([&](auto v) TOPG_INLINE_LAMBDA { b[v] = load_bytes(value + v * 64); });
    if (fetch) unroll<V>([&](auto v) TOPG_INLINE_LAMBDA { prefetch_l2(value + v * 64 + ahead); });
    unroll<R>([&](auto r) TOPG_INLINE_LAMBDA {
      const I32 x = splat_bytes(p + r * ptrdiff_t(sizeof(weights.p[0])));
      unroll<V>([&](auto v) TOPG_INLINE_LAMBDA { sums[r][v] = Cache::add_value(sums[r][v], b[v], x); });
    });
  }
}

// Vectors [first, first + V) of the weighted sums of values.
template <class Cache, int R, int V>
TOPG_INLINE void weigh_values(const KVLayout& kv, const typename Cache::Weights& weights, const BlockTiles& tiles, int first,
                              float* out) {
  for (int tile = tiles.first; tile < tiles.end;) {
    typename Cache::Sum sums[R][V];
    for_each_sum<R, V>([&](auto r, auto v) TOPG_INLINE_LAMBDA { sums[r][v] = Cache::value_start(); });
    const int run = tile / Cache::kRunTiles;
    do {
      add_values<Cache, R, V>(kv, weights, tiles, tile, first, sums);
    } while (++tile < tiles.end && tile % Cache::kRunTiles != 0);
    for_each_sum<R, V>([&](auto r, auto v) TOPG_INLINE_LAMBDA {
      Cache::store_run(out + r * kv.dim() + (first + v) * kLanes, sums[r][v], weights, r, run, tiles);
    });
  }
}

template <class Cache, int R, int V>
TOPG_INLINE void value_passes(const KVLayout& kv, const typename Cache::Weights& weights, const BlockTiles& tiles, int& first,
                              float* out) {
  for (; first + V <= kv.dim() / kLanes; first += V) weigh_values<Cache, R, V>(kv, weights, tiles, first, out);
  if constexpr (V > 1) value_passes<Cache, R, V / 2>(kv, weights, tiles, first, out);
}

template <class Cache, int R>
[[gnu::noinline]] void value_block(const KVLayout& kv, const typename Cache::Weights& weights, const BlockTiles& tiles,
                                   float* out) {
  int first = 0;
  value_passes<Cache, R, kValueVectors>(kv, weights, tiles, first, out);
}

// ---- a block ------------------------------------------------------------------------------------------------------------

// Scores and values of a cache, with vectors.
template <class CacheType>
struct VectorAttention {
  using Cache = CacheType;
  using Weights = typename Cache::Weights;
  static constexpr int kRows = kQueryRows;

  static void scores(const KVLayout& kv, const QueryTile& q, const BlockTiles& tiles, float* out) {
    with_rows(q.rows, [&](auto r) TOPG_INLINE_LAMBDA { score_block<Cache, decltype(r)::value>(kv, q, tiles, out); });
  }
  static void values(const KVLayout& kv, const Weights& weights, int rows, const BlockTiles& tiles, float* out) {
    with_rows(rows, [&](auto r) TOPG_INLINE_LAMBDA { value_block<Cache, decltype(r)::value>(kv, weights, tiles, out); });
  }
};

inline bool all_finite(const float* x, int count) {
  F32 poison = zero();
  for (int i = 0; i < count; i += kLanes) poison = fma(load(x + i), zero(), poison);
  return sum(poison) == 0;
}

// Values that are NaN reach rows that do not see them, even with weights of zero.  Such rows are done again, from copies.
template <class Attention>
[[gnu::noinline]] void silence_hidden_values(const KVLayout& kv, const typename Attention::Weights& weights, int rows,
                                             const BlockTiles& tiles, const Visible* visible, float* out) {
  constexpr int kElementBytes = 4 / Attention::Cache::kStepKeys;
  const int dim = kv.dim();
  CleanValues<kElementBytes> clean;
  alignas(64) float again[Attention::kRows * kMaxHeadDim];
  for (int r = 0; r < rows; ++r) {
    if (!visible[r].any() || visible[r].all(tiles.first_key(), tiles.end_key() - tiles.first_key()) || all_finite(out + r * dim, dim)) continue;
    BlockTiles seen = tiles;
    clean.apply(kv, visible[r], seen);
    Attention::values(kv, weights, rows, seen, again);
    __builtin_memcpy(out + r * dim, again + r * dim, size_t(dim) * sizeof(float));
  }
}

template <class Attention>
void attend_block(const AttentionShape& shape, const QueryTile& q, const BlockTiles& tiles, const Visible* visible,
                  typename Attention::Weights& weights, const BlockResult& result) {
  const KVLayout& kv = shape.kv;
  alignas(64) float scores[Attention::kRows * kKeyBlock];
  Attention::scores(kv, q, tiles, scores);
  for (int r = 0; r < q.rows; ++r) {
    float* row = scores + r * kKeyBlock;
    if (shape.softcap != 0) cap_scores(row, tiles, shape.softcap);
    result.maximum[r] = hide_scores(row, tiles, visible[r]);
    result.total[r] = Attention::Cache::weigh(row, visible[r], result.maximum[r], tiles, r, weights);
  }
  Attention::values(kv, weights, q.rows, tiles, result.out);
  if constexpr (Attention::Cache::kStepKeys < 4) silence_hidden_values<Attention>(kv, weights, q.rows, tiles, visible, result.out);
}

}  // namespace
}  // namespace topg
