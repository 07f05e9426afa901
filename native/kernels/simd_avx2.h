// Vectors of 16 lanes as pairs of AVX2 registers; needs FMA and F16C.
#pragma once

#include <immintrin.h>

#include "kernels/simd_common.h"

namespace topg {
namespace {

constexpr int kRegisterVectors = 8;  // vectors that the processor's registers hold

struct F32 {  // 16 float32
  __m256 low, high;
};
struct I32 {  // 16 int32
  __m256i low, high;
};
struct Mask {  // all bits of a lane, or none
  __m256 low, high;
};

TOPG_INLINE Mask first_lanes(int count) {  // lanes 0 .. count - 1; count may lie outside 0..16
  const __m256i limit = _mm256_set1_epi32(count), lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  const __m256i upper_lane = _mm256_add_epi32(lane, _mm256_set1_epi32(8));
  return {_mm256_castsi256_ps(_mm256_cmpgt_epi32(limit, lane)), _mm256_castsi256_ps(_mm256_cmpgt_epi32(limit, upper_lane))};
}

TOPG_INLINE F32 load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
TOPG_INLINE F32 load_first(const float* p, int count) {
  const Mask m = first_lanes(count);
  return {_mm256_maskload_ps(p, _mm256_castps_si256(m.low)), _mm256_maskload_ps(p + 8, _mm256_castps_si256(m.high))};
}
TOPG_INLINE void store(float* p, F32 x) {
  _mm256_storeu_ps(p, x.low);
  _mm256_storeu_ps(p + 8, x.high);
}
TOPG_INLINE void store_first(float* p, F32 x, int count) {
  const Mask m = first_lanes(count);
  _mm256_maskstore_ps(p, _mm256_castps_si256(m.low), x.low);
  _mm256_maskstore_ps(p + 8, _mm256_castps_si256(m.high), x.high);
}
TOPG_INLINE F32 splat(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
TOPG_INLINE I32 splat(int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
TOPG_INLINE F32 zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }

TOPG_INLINE F32 operator+(F32 a, F32 b) { return {_mm256_add_ps(a.low, b.low), _mm256_add_ps(a.high, b.high)}; }
TOPG_INLINE F32 operator-(F32 a, F32 b) { return {_mm256_sub_ps(a.low, b.low), _mm256_sub_ps(a.high, b.high)}; }
TOPG_INLINE F32 operator*(F32 a, F32 b) { return {_mm256_mul_ps(a.low, b.low), _mm256_mul_ps(a.high, b.high)}; }
TOPG_INLINE F32 operator/(F32 a, F32 b) { return {_mm256_div_ps(a.low, b.low), _mm256_div_ps(a.high, b.high)}; }
TOPG_INLINE F32 fma(F32 a, F32 b, F32 c) {  // a * b + c, rounded once
  return {_mm256_fmadd_ps(a.low, b.low, c.low), _mm256_fmadd_ps(a.high, b.high, c.high)};
}
TOPG_INLINE F32 abs(F32 a) {
  const __m256 sign = _mm256_set1_ps(-0.0f);
  return {_mm256_andnot_ps(sign, a.low), _mm256_andnot_ps(sign, a.high)};
}
TOPG_INLINE F32 sqrt(F32 a) { return {_mm256_sqrt_ps(a.low), _mm256_sqrt_ps(a.high)}; }
// When a lane of either is NaN the result is b's lane: put what may be NaN second to keep it.
TOPG_INLINE F32 max(F32 a, F32 b) { return {_mm256_max_ps(a.low, b.low), _mm256_max_ps(a.high, b.high)}; }
TOPG_INLINE F32 min(F32 a, F32 b) { return {_mm256_min_ps(a.low, b.low), _mm256_min_ps(a.high, b.high)}; }

TOPG_INLINE Mask equal(F32 a, F32 b) {
  return {_mm256_cmp_ps(a.low, b.low, _CMP_EQ_OQ), _mm256_cmp_ps(a.high, b.high, _CMP_EQ_OQ)};
}
TOPG_INLINE Mask less(F32 a, F32 b) {
  return {_mm256_cmp_ps(a.low, b.low, _CMP_LT_OQ), _mm256_cmp_ps(a.high, b.high, _CMP_LT_OQ)};
}
TOPG_INLINE Mask is_nan(F32 a) {
  return {_mm256_cmp_ps(a.low, a.low, _CMP_UNORD_Q), _mm256_cmp_ps(a.high, a.high, _CMP_UNORD_Q)};
}
TOPG_INLINE Mask operator&(Mask a, Mask b) { return {_mm256_and_ps(a.low, b.low), _mm256_and_ps(a.high, b.high)}; }
TOPG_INLINE Mask without(Mask a, Mask b) {  // lanes of a that are not in b
  return {_mm256_andnot_ps(b.low, a.low), _mm256_andnot_ps(b.high, a.high)};
}
TOPG_INLINE int lane_bits(Mask a) { return _mm256_movemask_ps(a.low) | _mm256_movemask_ps(a.high) << 8; }
TOPG_INLINE bool any(Mask a) { return lane_bits(a) != 0; }
TOPG_INLINE int first_lane(Mask a) { return __builtin_ctz(lane_bits(a)); }  // the lowest lane of a mask that has any
TOPG_INLINE F32 select(Mask m, F32 yes, F32 no) {
  return {_mm256_blendv_ps(no.low, yes.low, m.low), _mm256_blendv_ps(no.high, yes.high, m.high)};
}

TOPG_INLINE I32 operator+(I32 a, I32 b) { return {_mm256_add_epi32(a.low, b.low), _mm256_add_epi32(a.high, b.high)}; }
TOPG_INLINE I32 operator-(I32 a, I32 b) { return {_mm256_sub_epi32(a.low, b.low), _mm256_sub_epi32(a.high, b.high)}; }
TOPG_INLINE I32 max(I32 a, I32 b) { return {_mm256_max_epi32(a.low, b.low), _mm256_max_epi32(a.high, b.high)}; }
TOPG_INLINE F32 to_float(I32 a) { return {_mm256_cvtepi32_ps(a.low), _mm256_cvtepi32_ps(a.high)}; }
TOPG_INLINE I32 to_int(F32 a) { return {_mm256_cvtps_epi32(a.low), _mm256_cvtps_epi32(a.high)}; }  // rounds half to even
TOPG_INLINE I32 bits(F32 a) { return {_mm256_castps_si256(a.low), _mm256_castps_si256(a.high)}; }
TOPG_INLINE F32 from_bits(I32 a) { return {_mm256_castsi256_ps(a.low), _mm256_castsi256_ps(a.high)}; }
template <int N>
TOPG_INLINE I32 shift_left(I32 a) {
  return {_mm256_slli_epi32(a.low, N), _mm256_slli_epi32(a.high, N)};
}

// Sums in a fixed tree, whatever the instruction set: lane i and i + 8, then i + 4, i + 2, i + 1.
TOPG_INLINE float sum(F32 a) {
  const __m256 h = _mm256_add_ps(a.low, a.high);
  __m128 q = _mm_add_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
  q = _mm_add_ps(q, _mm_movehl_ps(q, q));
  return _mm_cvtss_f32(_mm_add_ss(q, _mm_movehdup_ps(q)));
}
TOPG_INLINE float largest(F32 a) {
  const __m256 h = _mm256_max_ps(a.low, a.high);
  __m128 q = _mm_max_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
  q = _mm_max_ps(q, _mm_movehl_ps(q, q));
  return _mm_cvtss_f32(_mm_max_ss(q, _mm_movehdup_ps(q)));
}
TOPG_INLINE int32_t largest(I32 a) {
  const __m256i h = _mm256_max_epi32(a.low, a.high);
  __m128i q = _mm_max_epi32(_mm256_castsi256_si128(h), _mm256_extracti128_si256(h, 1));
  q = _mm_max_epi32(q, _mm_shuffle_epi32(q, 0x4E));
  return _mm_cvtsi128_si32(_mm_max_epi32(q, _mm_shuffle_epi32(q, 0xB1)));
}
TOPG_INLINE int32_t sum(I32 a) {
  const __m256i h = _mm256_add_epi32(a.low, a.high);
  __m128i q = _mm_add_epi32(_mm256_castsi256_si128(h), _mm256_extracti128_si256(h, 1));
  q = _mm_add_epi32(q, _mm_shuffle_epi32(q, 0x4E));
  return _mm_cvtsi128_si32(_mm_add_epi32(q, _mm_shuffle_epi32(q, 0xB1)));
}

// x[i] = x[i] + x[i ^ N], or x[i ^ N] - x[i] where bit N of i is set: one butterfly of a Walsh-Hadamard transform.
template <int N>
TOPG_INLINE __m256 butterfly_half(__m256 a) {
  const __m256 other = N == 1   ? _mm256_permute_ps(a, 0xB1)
                       : N == 2 ? _mm256_permute_ps(a, 0x4E)
                                : _mm256_permute2f128_ps(a, a, 0x01);
  // A multiplication by 1 or -1 rounds nothing: one instruction adds and subtracts.
  constexpr float s1 = N == 1 ? -1 : 1, s2 = N == 2 ? -1 : 1, s4 = N == 4 ? -1 : 1;
  return _mm256_fmadd_ps(a, _mm256_setr_ps(1, s1, s2, s1 * s2, s4, s4 * s1, s4 * s2, s4 * s1 * s2), other);
}
template <int N>
TOPG_INLINE F32 butterfly(F32 a) {
  if constexpr (N == 8) return {_mm256_add_ps(a.low, a.high), _mm256_sub_ps(a.low, a.high)};
  return {butterfly_half<N>(a.low), butterfly_half<N>(a.high)};
}

TOPG_INLINE I32 load_bytes(const void* p) {
  return {_mm256_loadu_si256((const __m256i*)p), _mm256_loadu_si256((const __m256i*)p + 1)};
}
TOPG_INLINE I32 splat_bytes(const void* p) {  // the same 4 bytes in every lane
  int32_t word;
  __builtin_memcpy(&word, p, sizeof(word));
  return splat(word);
}

TOPG_INLINE F32 load_bfloat16(const uint16_t* p) {
  const __m256i half = _mm256_loadu_si256((const __m256i*)p);
  const I32 words = {_mm256_cvtepu16_epi32(_mm256_castsi256_si128(half)),
                     _mm256_cvtepu16_epi32(_mm256_extracti128_si256(half, 1))};
  return from_bits(shift_left<16>(words));
}
TOPG_INLINE F32 load_float16(const uint16_t* p) {
  return {_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)), _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p + 1))};
}
TOPG_INLINE F32 load_int8(const int8_t* p) {
  const __m128i bytes = _mm_loadu_si128((const __m128i*)p);
  return to_float({_mm256_cvtepi8_epi32(bytes), _mm256_cvtepi8_epi32(_mm_srli_si128(bytes, 8))});
}

TOPG_INLINE __m256i rounded_bfloat16(__m256 x) {
  const __m256i b = _mm256_castps_si256(x), upper = _mm256_srli_epi32(b, 16);
  // Half of the last kept place, less one where that place is even, carries into it exactly when rounding up is due.
  const __m256i odd = _mm256_and_si256(upper, _mm256_set1_epi32(1));
  const __m256i carried = _mm256_add_epi32(_mm256_add_epi32(b, _mm256_set1_epi32(0x7fff)), odd);
  const __m256i quiet_nan = _mm256_or_si256(upper, _mm256_set1_epi32(0x40));
  const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
  return _mm256_blendv_epi8(_mm256_srli_epi32(carried, 16), quiet_nan, nan);
}
TOPG_INLINE void store_bfloat16(uint16_t* p, F32 x) {  // rounds to nearest even; NaN stays NaN
  // Packing works within halves of registers: quarters 0, 2, 1, 3 come out.
  const __m256i packed = _mm256_packus_epi32(rounded_bfloat16(x.low), rounded_bfloat16(x.high));
  _mm256_storeu_si256((__m256i*)p, _mm256_permute4x64_epi64(packed, 0xD8));
}
TOPG_INLINE void store_bfloat16(uint16_t* p, F32 a, F32 b) {
  store_bfloat16(p, a);
  store_bfloat16(p + 16, b);
}
TOPG_INLINE void store_int8(int8_t* p, I32 x) {  // saturates
  const __m256i words = _mm256_permute4x64_epi64(_mm256_packs_epi32(x.low, x.high), 0xD8);
  _mm_storeu_si128((__m128i*)p, _mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1)));
}

TOPG_INLINE void store_uint8(uint8_t* p, I32 x) {  // of what is not negative; saturates
  const __m256i words = _mm256_permute4x64_epi64(_mm256_packus_epi32(x.low, x.high), 0xD8);
  _mm_storeu_si128((__m128i*)p, _mm_packus_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1)));
}

TOPG_INLINE void store_int8(int8_t* p, I32 a, I32 b, I32 c, I32 d) {  // 64 codes, saturated
  // Packing works within halves of registers: 4 codes of a, 4 of b, and so on come out.
  const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
  const __m256i low = _mm256_packs_epi16(_mm256_packs_epi32(a.low, a.high), _mm256_packs_epi32(b.low, b.high));
  const __m256i high = _mm256_packs_epi16(_mm256_packs_epi32(c.low, c.high), _mm256_packs_epi32(d.low, d.high));
  _mm256_storeu_si256((__m256i*)p, _mm256_permutevar8x32_epi32(low, order));
  _mm256_storeu_si256((__m256i*)p + 1, _mm256_permutevar8x32_epi32(high, order));
}
// Of a and b to p, of c and d to q.
TOPG_INLINE void store_uint8(uint8_t* p, uint8_t* q, I32 a, I32 b, I32 c, I32 d) {
  store_uint8(p, a);
  store_uint8(p + 16, b);
  store_uint8(q, c);
  store_uint8(q + 16, d);
}

// In 16 bits, where no product or sum saturates: vpmaddubsw would.
TOPG_INLINE __m256i dot4_half(__m256i acc, __m256i unsigned_bytes, __m256i signed_bytes) {
  const __m256i even = _mm256_madd_epi16(_mm256_and_si256(unsigned_bytes, _mm256_set1_epi16(0xff)),
                                         _mm256_srai_epi16(_mm256_slli_epi16(signed_bytes, 8), 8));
  const __m256i odd = _mm256_madd_epi16(_mm256_srli_epi16(unsigned_bytes, 8), _mm256_srai_epi16(signed_bytes, 8));
  return _mm256_add_epi32(acc, _mm256_add_epi32(even, odd));
}
// acc[i] += sum over j of unsigned[4 i + j] * signed[4 i + j], exact in int32.
TOPG_INLINE I32 dot4(I32 acc, I32 unsigned_bytes, I32 signed_bytes) {
  return {dot4_half(acc.low, unsigned_bytes.low, signed_bytes.low),
          dot4_half(acc.high, unsigned_bytes.high, signed_bytes.high)};
}
// Of each byte.
TOPG_INLINE I32 low_nibbles(I32 a) {
  const __m256i nibble = _mm256_set1_epi8(15);
  return {_mm256_and_si256(a.low, nibble), _mm256_and_si256(a.high, nibble)};
}
TOPG_INLINE I32 high_nibbles(I32 a) { return low_nibbles({_mm256_srli_epi32(a.low, 4), _mm256_srli_epi32(a.high, 4)}); }
// The first and the second of each lane's pair of bfloat16.
TOPG_INLINE F32 low_bfloat16(I32 a) { return from_bits(shift_left<16>(a)); }
TOPG_INLINE F32 high_bfloat16(I32 a) {
  const __m256i upper = _mm256_set1_epi32(int32_t(0xffff0000));
  return from_bits({_mm256_and_si256(a.low, upper), _mm256_and_si256(a.high, upper)});
}
// acc[i] += a[2 i] * b[2 i] + a[2 i + 1] * b[2 i + 1] of bfloat16 pairs.
TOPG_INLINE F32 dot2(F32 acc, I32 a, I32 b) {
  return fma(low_bfloat16(a), low_bfloat16(b), fma(high_bfloat16(a), high_bfloat16(b), acc));
}

}  // namespace
}  // namespace topg
