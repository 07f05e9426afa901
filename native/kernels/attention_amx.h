// Attention of bfloat16 and int8 caches with AMX tiles: 16 query rows against 16 keys, or their weights against 16 values, at
// a time.  Any number of rows goes this way: other instructions would round sums of bfloat16 products differently.
//
// Pages lie as the instructions want it: keys [dim / 4 bytes][32 tokens], values [32 tokens / 4 bytes][dim].  Registers always
// have 16 rows of 64 bytes (enter_isa); what has fewer is copied, and filled up with zeros.
#pragma once

#include "kernels/attention_block.h"

namespace topg {
namespace {

constexpr int kAmxQueryRows = 16;
constexpr int kAmxRowBytes = 64;
constexpr int kAmxSteps = kAmxRowBytes / 4;  // of a product of two registers

// Tile instructions by register number; the intrinsics take literals only, and do not tell the compiler what they read and
// write.
template <int kRegister>
TOPG_INLINE void tile_zero() {
  asm volatile("tilezero %%tmm%c0" ::"i"(kRegister));
}
template <int kRegister>
TOPG_INLINE void tile_load(const void* rows, ptrdiff_t stride) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(rows), "r"(stride), "i"(kRegister) : "memory");
}
template <int kRegister>
TOPG_INLINE void tile_store(void* rows, ptrdiff_t stride) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(rows), "r"(stride), "i"(kRegister) : "memory");
}

// Rows that a register is loaded from.
struct AmxRows64 {
  const uint8_t* rows;
  ptrdiff_t stride;
};

// What a register of fewer than 16 rows of 64 bytes is loaded from.
struct alignas(64) AmxCopy {
  uint8_t rows[16][kAmxRowBytes];

  // Rows [first, end) from rows `stride` bytes apart, of which `bytes` bytes are used.
  TOPG_INLINE void set(int first, int end, const uint8_t* from, ptrdiff_t stride, int bytes = kAmxRowBytes) {
    const __mmask64 used = bytes >= kAmxRowBytes ? ~0ull : (1ull << bytes) - 1;
    for (int r = first; r < end; ++r, from += stride) _mm512_store_si512(rows[r], _mm512_maskz_loadu_epi8(used, from));
  }
  TOPG_INLINE void clear(int first, int end) {
    for (int r = first; r < end; ++r) _mm512_store_si512(rows[r], _mm512_setzero_si512());
  }
};

// Register kSum += register kLeft [16 rows][16 steps] times register kRight [16 steps][16 lanes].
template <class Cache, int kSum, int kLeft, int kRight>
TOPG_INLINE void multiply_keys() {
  if constexpr (Cache::kStepKeys == 2) {
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(kSum), "i"(kLeft), "i"(kRight));
  } else {  // signed queries, unsigned keys
    asm volatile("tdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(kSum), "i"(kLeft), "i"(kRight));
  }
}
template <class Cache, int kSum, int kLeft, int kRight>
TOPG_INLINE void multiply_values() {
  if constexpr (Cache::kStepKeys == 2) {
    multiply_keys<Cache, kSum, kLeft, kRight>();
  } else {  // unsigned weights, signed values
    asm volatile("tdpbusd %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(kSum), "i"(kLeft), "i"(kRight));
  }
}

// Registers: 0 to 3 hold sums, 4 and 5 left factors, 6 and 7 right ones.
constexpr int kAmxLeft = 4, kAmxRight = 6;

// ---- scores -------------------------------------------------------------------------------------------------------------

template <class Cache>
class AmxScores {
 public:
  AmxScores(const KVLayout& kv, const QueryTile& q, const BlockTiles& tiles)
      : steps_(int(kv.half_tile_bytes()) / kStepKeyBytes), parts_((steps_ + kAmxSteps - 1) / kAmxSteps), tiles_(tiles) {
    for (int part = 0; part < parts_; ++part) {
      queries_[part].set(0, q.rows, q.values + part * kAmxRowBytes, q.row_bytes, (steps_ - part * kAmxSteps) * 4);
      queries_[part].clear(q.rows, kAmxQueryRows);
    }
  }

  // out [16][kKeyBlock], sums as the instructions give them: int32 for an int8 cache.
  void run(float* out) {
    load_queries(0);
    int tile = tiles_.first;
    for (; tile + 2 <= tiles_.end; tile += 2) score<2>(tile, out + tile * kTileKeys);
    if (tile < tiles_.end) score<1>(tile, out + tile * kTileKeys);
  }

 private:
  // kTiles tiles from `tile` on, each in two registers.
  template <int kTiles>
  TOPG_INLINE void score(int tile, float* out) {
    unroll<2 * kTiles>([&](auto v) TOPG_INLINE_LAMBDA { sum_parts<v>(tile + v / 2, v % 2); });
    unroll<2 * kTiles>([&](auto v) TOPG_INLINE_LAMBDA { tile_store<v>(out + v * kLanes, kKeyBlock * sizeof(float)); });
  }

  // One register from beginning to end, before the next one is begun: the tiles' units are busier than by turns.
  template <int kSum>
  TOPG_INLINE void sum_parts(int tile, int half) {
    tile_zero<kSum>();
    for (int part = 0; part < parts_; part += 2) {
      if (parts_ > 2) load_queries(part);
      add_part<kSum, 0>(tile, part, half);
      if (part + 1 < parts_) add_part<kSum, 1>(tile, part + 1, half);
    }
  }

  template <int kSum, int kTurn>
  TOPG_INLINE void add_part(int tile, int part, int half) {
    const AmxRows64 from = keys(tile, part, half);
    tile_load<kAmxRight + kTurn>(from.rows, from.stride);
    multiply_keys<Cache, kSum, kAmxLeft + kTurn, kAmxRight + kTurn>();
  }

  TOPG_INLINE void load_queries(int part) {
    tile_load<kAmxLeft>(queries_[part].rows, kAmxRowBytes);
    if (part + 1 < parts_) tile_load<kAmxLeft + 1>(queries_[part + 1].rows, kAmxRowBytes);
  }

  // 16 steps of half a tile's keys; a last part of fewer steps is copied.
  TOPG_INLINE AmxRows64 keys(int tile, int part, int half) {
    const ptrdiff_t at = ptrdiff_t(part) * kAmxSteps * kStepKeyBytes + half * kAmxRowBytes;
    const uint8_t* from = tiles_.keys[tile] + at;
    const int steps = steps_ - part * kAmxSteps;
    if (tiles_.fetch_values) fetch(tiles_.values[tile] + at, steps < kAmxSteps ? steps : kAmxSteps);
    if (__builtin_expect(steps >= kAmxSteps, true)) return {from, kStepKeyBytes};
    rest_.set(0, steps, from, kStepKeyBytes);
    rest_.clear(steps, kAmxSteps);
    return {rest_.rows[0], kAmxRowBytes};
  }

  static TOPG_INLINE void fetch(const uint8_t* from, int steps) {
    for (int i = 0; i < steps; ++i) prefetch_l2(from + i * kStepKeyBytes);
  }

  static constexpr int kMostParts = kMaxHeadDim * 2 / kAmxRowBytes;

  const int steps_, parts_;
  const BlockTiles& tiles_;
  AmxCopy queries_[kMostParts];
  AmxCopy rest_;
};

// int32 sums to scores, as Int8Cache::score makes them.
inline void finish_int8_scores(const KVLayout& kv, const QueryTile& q, const BlockTiles& tiles, float* scores) {
  for (int i = tiles.first_key(); i < tiles.end_key(); i += kLanes) {
    const F32 keys = load(key_scales(kv, tiles.keys[i / kTileKeys]) + i % kTileKeys);
    for (int r = 0; r < q.rows; ++r) {
      float* place = scores + r * kKeyBlock + i;
      const I32 sums = load_bytes(place) + splat(-128 * q.sums[r]);
      store(place, to_float(sums) * (keys * splat(q.scales[r])));
    }
  }
}

// ---- values -------------------------------------------------------------------------------------------------------------

// Weights times values, tile by tile of keys.
//
// Of int8, a tile has 8 rows of values where a register has 16.  The register is loaded from 8 rows further up, where the last
// of the tile's keys lie (attention_tiles.h), and their weights are zeros.
template <class Cache>
class AmxValues {
 public:
  static constexpr int kWeightBytes = kAmxRowBytes;  // of a tile
  static constexpr int kTileSteps = kTileKeys / Cache::kStepKeys;
  static constexpr int kRowsAbove = kAmxSteps - kTileSteps;

  // weights [16][kBlockTiles][kWeightBytes]
  AmxValues(const KVLayout& kv, const uint8_t* weights, const BlockTiles& tiles)
      : step_bytes_(kv.dim() * 4), weights_(weights), tiles_(tiles) {}

  // Vectors [first, first + V) of the sums over tiles [tile, end) to out [16][row_floats].
  template <int V>
  TOPG_INLINE void run(int tile, int end, int first, float* out, int row_floats) {
    unroll<V>([&](auto v) TOPG_INLINE_LAMBDA { tile_zero<v>(); });
    for (; tile < end; ++tile) {
      if (tiles_.next_keys[tile] != nullptr) fetch<V>(tiles_.next_keys[tile] + first * kAmxRowBytes);
      tile_load<kAmxLeft>(weights_ + tile * kWeightBytes, kBlockTiles * kWeightBytes);
      const uint8_t* rows = tiles_.values[tile] - kRowsAbove * step_bytes_ + first * kAmxRowBytes;
      unroll<V>([&](auto v) TOPG_INLINE_LAMBDA {
        constexpr int kRight = kAmxRight + v % 2;
        tile_load<kRight>(rows + v * kAmxRowBytes, step_bytes_);
        multiply_values<Cache, v, kAmxLeft, kRight>();
      });
    }
    unroll<V>([&](auto v) TOPG_INLINE_LAMBDA { tile_store<v>(out + v * kLanes, row_floats * ptrdiff_t(sizeof(float))); });
  }

 private:
  template <int V>
  TOPG_INLINE void fetch(const uint8_t* from) const {
    for (int step = 0; step < kTileSteps; ++step, from += step_bytes_) {
      unroll<V>([&](auto v) TOPG_INLINE_LAMBDA { prefetch_l2(from + v * kAmxRowBytes); });
    }
  }

  const ptrdiff_t step_bytes_;
  const uint8_t* weights_;
  const BlockTiles& tiles_;
};

// function(vectors, first vector) until all of dim are done.
template <int V = 4, class Function>
TOPG_INLINE void for_each_pass(int dim, Function&& function, int first = 0) {
  for (; first + V <= dim / kLanes; first += V) function(Index<V>{}, first);
  if constexpr (V > 1) for_each_pass<V / 2>(dim, function, first);
}

// ---- the two caches ------------------------------------------------------------------------------------------------------

struct AmxBFloat16Attention {
  using Cache = BFloat16Cache;
  static constexpr int kRows = kAmxQueryRows;
  struct Weights {
    alignas(64) uint16_t p[kRows][kKeyBlock];
  };

  static void scores(const KVLayout& kv, const QueryTile& q, const BlockTiles& tiles, float* out) {
    AmxScores<Cache>(kv, q, tiles).run(out);
  }

  static void values(const KVLayout& kv, const Weights& weights, int, const BlockTiles& tiles, float* out) {
    AmxValues<Cache> sums(kv, reinterpret_cast<const uint8_t*>(weights.p), tiles);
    for_each_pass(kv.dim(), [&](auto vectors, int first) TOPG_INLINE_LAMBDA {
      sums.template run<vectors>(tiles.first, tiles.end, first, out + first * kLanes, kv.dim());
    });
  }
};

struct AmxInt8Attention {
  using Cache = Int8Cache;
  static constexpr int kRows = kAmxQueryRows;
  struct Weights {
    static constexpr int kTileBytes = AmxValues<Cache>::kWeightBytes, kTileOffset = kTileBytes - kTileKeys;
    alignas(64) uint8_t p[kRows][kBlockTiles * kTileBytes] = {};  // the first half of each tile's stays zeros
    float scales[kRows][kKeyBlock / kScaleKeys];
  };

  static void scores(const KVLayout& kv, const QueryTile& q, const BlockTiles& tiles, float* out) {
    AmxScores<Cache>(kv, q, tiles).run(out);
    finish_int8_scores(kv, q, tiles, out);
  }

  static void values(const KVLayout& kv, const Weights& weights, int rows, const BlockTiles& tiles, float* out) {
    AmxValues<Cache> sums(kv, weights.p[0], tiles);
    for_each_pass(kv.dim(), [&](auto vectors, int first) TOPG_INLINE_LAMBDA {
      constexpr int kWidth = decltype(vectors)::value * kLanes;
      alignas(64) float products[kRows][kWidth];
      for (int tile = tiles.first; tile < tiles.end; tile += Cache::kRunTiles) {
        const int end = tile + Cache::kRunTiles < tiles.end ? tile + Cache::kRunTiles : tiles.end;
        sums.template run<vectors>(tile, end, first, products[0], kWidth);
        for (int r = 0; r < rows; ++r) {
          const F32 scale = splat(weights.scales[r][tile / Cache::kRunTiles]);
          float* place = out + r * kv.dim() + first * kLanes;
          unroll<vectors>([&](auto v) TOPG_INLINE_LAMBDA {
            const F32 sum = to_float(load_bytes(products[r] + v * kLanes));
            const F32 before = tile == tiles.first ? zero() : load(place + v * kLanes);
            store(place + v * kLanes, fma(sum, scale, before));
          });
        }
      }
    });
  }
};

}  // namespace
}  // namespace topg
