// Scores of a row and a block of keys to weights: powers of two, relative to the largest.
#pragma once

#include "kernels/attention_tiles.h"
#include "kernels/simd.h"
#include "kernels/vector_math.h"

namespace topg {
namespace {

constexpr float kLog2E = 1.44269504f;
constexpr int kScaleVectors = kScaleKeys / kLanes;
static_assert(kScaleVectors == 4);

// Scores become exponents of two; a soft cap bounds them first.
inline void cap_scores(float* scores, const BlockTiles& tiles, float softcap) {
  for (int i = tiles.first_key(); i < tiles.end_key(); i += kLanes) {
    store(scores + i, splat(softcap * kLog2E) * tanh(load(scores + i) * splat(1 / softcap)));
  }
}

// The largest score that the row sees.  Those of other keys become -inf, to the end of the last run.
inline float hide_scores(float* scores, const BlockTiles& tiles, const Visible& visible) {
  const F32 lowest = splat(-__builtin_inff());
  F32 most[kScaleVectors] = {lowest, lowest, lowest, lowest};
  for (int run = tiles.first_key(); run < tiles.end_key(); run += kScaleKeys) {
    float* s = scores + run;
    if (visible.all(run, kScaleKeys)) {
      unroll<kScaleVectors>([&](auto v) TOPG_INLINE_LAMBDA { most[v] = max(most[v], load(s + v * kLanes)); });
      continue;
    }
    unroll<kScaleVectors>([&](auto v) TOPG_INLINE_LAMBDA {
      const F32 x = select(visible_lanes(visible, run + v * kLanes), load(s + v * kLanes), lowest);
      store(s + v * kLanes, x);
      most[v] = max(most[v], x);
    });
  }
  return largest(max(max(most[0], most[1]), max(most[2], most[3])));
}

TOPG_INLINE float sum_of(const F32 (&x)[kScaleVectors]) { return sum((x[0] + x[1]) + (x[2] + x[3])); }

// 2^x for x <= 0, to 7.5e-5 relative: weights of 8 bits and bfloat16 are rounded to 2e-3.  NaN stays NaN.
TOPG_INLINE F32 rough_exp2(F32 x) {
  // Minimax fits over the intervals of the fractions.
#if defined(__AVX512F__)
  const F32 fraction = {_mm512_reduce_ps(x.v, _MM_FROUND_TO_NEG_INF)};  // x - floor(x), in 0 .. 1
  const F32 power = polynomial(fraction, {0.99992522f, 0.69583353f, 0.22606716f, 0.078024524f});
  return {_mm512_scalef_ps(power.v, x.v)};
#else
  x = max(splat(-126.0f), x);
  const F32 biased = x + splat(kRoundAndBias);
  const F32 fraction = x - (biased - splat(kRoundAndBias));  // -0.5 .. 0.5
  const F32 twice = polynomial(fraction, {2 * 0.99992807f, 2 * 0.69326099f, 2 * 0.24261113f, 2 * 0.05517167f});
  return twice * half_power_of_two(biased);
#endif
}

// ---- weights of float32 and bfloat16 --------------------------------------------------------------------------------------

// Weights of a row from its scores; returns their sum.
inline float weigh_floats(const float* scores, const BlockTiles& tiles, float maximum, float* weights) {
  const F32 most = splat(maximum), none = zero();
  F32 totals[kScaleVectors] = {none, none, none, none};
  for (int run = tiles.first_key(); run < tiles.end_key(); run += kScaleKeys) {
    unroll<kScaleVectors>([&](auto v) TOPG_INLINE_LAMBDA {
      const F32 weight = exp2(load(scores + run + v * kLanes) - most);
      store(weights + run + v * kLanes, weight);
      totals[v] = totals[v] + weight;
    });
  }
  return sum_of(totals);
}

// The sum is that of the rounded weights: they are what the values are multiplied with.
inline float weigh_bfloat16(const float* scores, const BlockTiles& tiles, float maximum, uint16_t* weights) {
  const F32 most = splat(maximum), none = zero();
  F32 totals[kScaleVectors] = {none, none, none, none};
  for (int run = tiles.first_key(); run < tiles.end_key(); run += kScaleKeys) {
    unroll<2>([&](auto pair) TOPG_INLINE_LAMBDA {
      const float* s = scores + run + pair * 2 * kLanes;
      const F32 left = rough_exp2(load(s) - most), right = rough_exp2(load(s + kLanes) - most);
      uint16_t* place = weights + run + pair * 2 * kLanes;
      store_bfloat16(place, left, right);
      const I32 rounded = load_bytes(place);
      totals[2 * pair] = totals[2 * pair] + low_bfloat16(rounded);
      totals[2 * pair + 1] = totals[2 * pair + 1] + high_bfloat16(rounded);
    });
  }
  return sum_of(totals);
}

// ---- weights of 8 bits ---------------------------------------------------------------------------------------------------

// The largest lane of each of four vectors, in lanes 0 to 3.
TOPG_INLINE F32 largest_of_each(F32 a, F32 b, F32 c, F32 d) {
#if defined(__AVX512F__)
  const __m512 ab = _mm512_max_ps(_mm512_unpacklo_ps(a.v, b.v), _mm512_unpackhi_ps(a.v, b.v));
  const __m512 cd = _mm512_max_ps(_mm512_unpacklo_ps(c.v, d.v), _mm512_unpackhi_ps(c.v, d.v));
  __m512 most = _mm512_max_ps(_mm512_shuffle_ps(ab, cd, 0x44), _mm512_shuffle_ps(ab, cd, 0xEE));
  most = _mm512_max_ps(most, _mm512_shuffle_f32x4(most, most, 0x4E));
  return {_mm512_max_ps(most, _mm512_shuffle_f32x4(most, most, 0xB1))};
#else
  const float lanes[kLanes] = {largest(a), largest(b), largest(c), largest(d)};
  return load(lanes);
#endif
}

struct ByteWeights {
  uint8_t* codes;  // 32 for each tile of keys, `tile_bytes` apart
  ptrdiff_t tile_bytes;
  float* scales;  // [kKeyBlock / kScaleKeys]
};

// kRuns runs of keys; returns the weights' sum.  A code times its run's scale is weight times the value's scale.
template <int kRuns>
TOPG_INLINE float weigh_bytes(const float* scores, float maximum, const float* value_scales, const ByteWeights& out) {
  const F32 most = splat(maximum), none = zero();
  F32 totals[kScaleVectors] = {none, none, none, none}, peaks[4] = {none, none, none, none};
  F32 weighted[kRuns][kScaleVectors];
  unroll<kRuns>([&](auto run) TOPG_INLINE_LAMBDA {
    unroll<kScaleVectors>([&](auto v) TOPG_INLINE_LAMBDA {
      const int key = run * kScaleKeys + v * kLanes;
      const F32 weight = rough_exp2(load(scores + key) - most);
      totals[v] = totals[v] + weight;
      weighted[run][v] = weight * load(value_scales + key);
    });
    const F32(&w)[kScaleVectors] = weighted[run];
    peaks[run] = max(max(w[0], w[1]), max(w[2], w[3]));
  });
  // Where all weights of a run are next to nothing, so are the codes.
  const F32 peak = max(splat(0x1p-100f), largest_of_each(peaks[0], peaks[1], peaks[2], peaks[3]));
  float scales[kLanes], factors[kLanes];
  store(scales, peak * splat(1.0f / 255));
  store(factors, splat(255.0f) / peak);
  unroll<kRuns>([&](auto run) TOPG_INLINE_LAMBDA {
    const F32 factor = splat(factors[run]);
    I32 codes[kScaleVectors];
    unroll<kScaleVectors>([&](auto v) TOPG_INLINE_LAMBDA { codes[v] = to_int(weighted[run][v] * factor); });
    uint8_t* place = out.codes + run * (kScaleKeys / kTileKeys) * out.tile_bytes;
    store_uint8(place, place + out.tile_bytes, codes[0], codes[1], codes[2], codes[3]);
    out.scales[run] = scales[run];
  });
  return sum_of(totals);
}

}  // namespace
}  // namespace topg
