// Grouped weights times int8 activations with AVX2, which has no dot4: tiles of one half of the block's channels at a time,
// their float32 sums in memory.  No 16-bit sum saturates, whatever the codes are.
#pragma once

#include "kernels/grouped_format.h"

namespace topg {
namespace {

constexpr int kAvx2Rows = 4;

TOPG_INLINE I32 multiply_words(I32 a, I32 b) {  // a[2 i] * b[2 i] + a[2 i + 1] * b[2 i + 1] of words
  return {_mm256_madd_epi16(a.low, b.low), _mm256_madd_epi16(a.high, b.high)};
}

// int8 weights: 16-bit products of words.  A step's 4 columns are multiplied as columns 0 and 2, then 1 and 3: the bytes of
// the codes' words are taken apart with one instruction each.
template <class Format, int kRows>
class WordDots {
 public:
  // The group's activations as words, in the order of 0 2 1 3.
  TOPG_INLINE void load_group(const QuantisedRows& x) {
    const __m128i order = _mm_setr_epi8(0, 2, 1, 3, 4, 6, 5, 7, 8, 10, 9, 11, 12, 14, 13, 15);
    for (int r = 0; r < kRows; ++r) {
      for (int k = 0; k < Format::kGroup; k += kLanes) {
        const __m128i codes = _mm_loadu_si128((const __m128i*)(x.codes + r * x.stride + k));
        _mm256_store_si256((__m256i*)(words_[r] + k), _mm256_cvtepi8_epi16(_mm_shuffle_epi8(codes, order)));
      }
    }
  }

  // dots += the group's products; codes point at those of the wanted half.
  TOPG_INLINE void add(I32 (&dots)[kRows], const uint8_t* codes, TilePrefetch& prefetch) const {
    const __m256i low_byte = _mm256_set1_epi16(0xff);
#pragma GCC unroll 1
    for (int k = 0; k < Format::kGroup; k += kStepColumns, codes += kStepBytes) {
      prefetch.step();
      const I32 step = load_bytes(codes);
      const I32 even = {_mm256_and_si256(step.low, low_byte), _mm256_and_si256(step.high, low_byte)};
      const I32 odd = {_mm256_srli_epi16(step.low, 8), _mm256_srli_epi16(step.high, 8)};
      unroll<kRows>([&](auto r) TOPG_INLINE_LAMBDA {
        dots[r] = dots[r] + multiply_words(even, splat_bytes(words_[r] + k));
        dots[r] = dots[r] + multiply_words(odd, splat_bytes(words_[r] + k + 2));
      });
    }
  }

 private:
  alignas(32) int16_t words_[kRows][Format::kGroup];
};

TOPG_INLINE I32 add_pairs(I32 words, I32 unsigned_bytes, I32 signed_bytes) {
  return {_mm256_add_epi16(words.low, _mm256_maddubs_epi16(unsigned_bytes.low, signed_bytes.low)),
          _mm256_add_epi16(words.high, _mm256_maddubs_epi16(unsigned_bytes.high, signed_bytes.high))};
}

// int4 weights: products are so small that a whole group of 32 columns adds up to at most 8 * 2 * 15 * 128 in 16 bits.
template <class Format, int kRows>
class NibbleDots {
 public:
  static_assert(Format::kGroup / kStepColumns * 2 * 15 * 128 < 32768, "sums of words would overflow");

  TOPG_INLINE void load_group(const QuantisedRows& x) {
    x_ = x.codes;
    stride_ = x.stride;
  }

  TOPG_INLINE void add(I32 (&dots)[kRows], const uint8_t* codes, TilePrefetch& prefetch) const {
    I32 words[kRows];
    unroll<kRows>([&](auto r) TOPG_INLINE_LAMBDA { words[r] = splat(0); });
    const int8_t* x = x_;
#pragma GCC unroll 1
    for (int k = 0; k < Format::kGroup; k += 2 * kStepColumns, x += 2 * kStepColumns, codes += kStepBytes) {
      prefetch.step(2);
      const I32 step = load_bytes(codes);
      const I32 low = low_nibbles(step), high = high_nibbles(step);
      unroll<kRows>([&](auto r) TOPG_INLINE_LAMBDA {
        words[r] = add_pairs(words[r], low, splat_bytes(x + r * stride_));
        words[r] = add_pairs(words[r], high, splat_bytes(x + r * stride_ + kStepColumns));
      });
    }
    const I32 ones = splat(0x00010001);
    unroll<kRows>([&](auto r) TOPG_INLINE_LAMBDA { dots[r] = dots[r] + multiply_words(words[r], ones); });
  }

 private:
  const int8_t* x_;
  ptrdiff_t stride_;
};

template <WeightCode kCode>
struct DotsOf {
  template <class Format, int kRows>
  using Type = WordDots<Format, kRows>;
};
template <>
struct DotsOf<WeightCode::kInt4> {
  template <class Format, int kRows>
  using Type = NibbleDots<Format, kRows>;
};

// out += dots scaled, the same arithmetic as add_scaled of grouped_tile.h; for one half.
template <class Format, int kRows>
TOPG_INLINE void add_scaled_half(float* out, const I32 (&dots)[kRows], const uint8_t* scales, int half,
                                 const QuantisedRows& x) {
  const F32 weight_scales = load_scales<Format::kScale>(scales, half);
  F32 minimums = zero();
  if constexpr (Format::kMinimum) minimums = load_scales<Format::kScale>(scales + Format::kScaleBytes, half);
  unroll<kRows>([&](auto r) TOPG_INLINE_LAMBDA {
    const float x_scale = x.scales[r * x.groups];
    float* p = out + r * kBlockChannels + half * kLanes;
    F32 sum = fma(to_float(dots[r]), splat(x_scale) * weight_scales, load(p));
    if constexpr (Format::kMinimum) sum = fma(splat(x_scale * float(x.sums[r * x.groups])), minimums, sum);
    store(p, sum);
  });
}

template <class Format, int kRows>
[[gnu::noinline]] void grouped_avx2_tile(const TileArguments& a) {
  QuantisedRows x(*a.x, a.row);
  TilePrefetch prefetch(a);
  TilePrefetch none{TileArguments{}};  // the second half reads the lines between those of the first
  const uint8_t* group = a.block;
  typename DotsOf<Format::kCode>::template Type<Format, kRows> group_dots;
  for (int i = 0; i < kRows * kBlockChannels; i += kLanes) store(a.out + i, zero());
  for (int left = a.x->groups; left > 0; --left) {
    group_dots.load_group(x);
    for (int half = 0; half < 2; ++half) {
      I32 dots[kRows];
      unroll<kRows>([&](auto r) TOPG_INLINE_LAMBDA { dots[r] = splat(-Format::kBias * x.sums[r * x.groups]); });
      group_dots.add(dots, group + half * kHalfBytes, half == 0 ? prefetch : none);
      add_scaled_half<Format, kRows>(a.out, dots, group + Format::kCodeBytes, half, x);
    }
    group += Format::kBytes;
    x.next_group(Format::kGroup);
  }
}

template <class Format, int kRows = kAvx2Rows>
void multiply_grouped_avx2(const WeightFormat& format, const TileArguments& a) {
  if (a.rows == kRows) return grouped_avx2_tile<Format, kRows>(a);
  if constexpr (kRows > 1) multiply_grouped_avx2<Format, kRows - 1>(format, a);
}

}  // namespace
}  // namespace topg
