// Vectors of 16 lanes.  Kernels are written once against these names; simd_avx2.h and simd_generic.h offer the same ones.
#pragma once

// GCC 12 takes the deliberately undefined operands of its own intrinsics for a mistake.
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#include <immintrin.h>
#pragma GCC diagnostic pop

#include "kernels/simd_common.h"

namespace topg {
namespace {

constexpr int kRegisterVectors = 32;  // vectors that the processor's registers hold

struct F32 {  // 16 float32
  __m512 v;
};
struct I32 {  // 16 int32
  __m512i v;
};
struct Mask {  // one bit a lane
  __mmask16 v;
};

TOPG_INLINE F32 load(const float* p) { return {_mm512_loadu_ps(p)}; }
TOPG_INLINE F32 load_first(const float* p, int count) { return {_mm512_maskz_loadu_ps(__mmask16((1u << count) - 1), p)}; }
TOPG_INLINE void store(float* p, F32 x) { _mm512_storeu_ps(p, x.v); }
TOPG_INLINE void store_first(float* p, F32 x, int count) { _mm512_mask_storeu_ps(p, __mmask16((1u << count) - 1), x.v); }
TOPG_INLINE F32 splat(float x) { return {_mm512_set1_ps(x)}; }
TOPG_INLINE I32 splat(int32_t x) { return {_mm512_set1_epi32(x)}; }
TOPG_INLINE F32 zero() { return {_mm512_setzero_ps()}; }

TOPG_INLINE F32 operator+(F32 a, F32 b) { return {_mm512_add_ps(a.v, b.v)}; }
TOPG_INLINE F32 operator-(F32 a, F32 b) { return {_mm512_sub_ps(a.v, b.v)}; }
TOPG_INLINE F32 operator*(F32 a, F32 b) { return {_mm512_mul_ps(a.v, b.v)}; }
TOPG_INLINE F32 operator/(F32 a, F32 b) { return {_mm512_div_ps(a.v, b.v)}; }
TOPG_INLINE F32 fma(F32 a, F32 b, F32 c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }  // a * b + c, rounded once
TOPG_INLINE F32 abs(F32 a) { return {_mm512_abs_ps(a.v)}; }
TOPG_INLINE F32 sqrt(F32 a) { return {_mm512_sqrt_ps(a.v)}; }
// When a lane of either is NaN the result is b's lane: put what may be NaN second to keep it.
TOPG_INLINE F32 max(F32 a, F32 b) { return {_mm512_max_ps(a.v, b.v)}; }
TOPG_INLINE F32 min(F32 a, F32 b) { return {_mm512_min_ps(a.v, b.v)}; }

TOPG_INLINE Mask equal(F32 a, F32 b) { return {_mm512_cmp_ps_mask(a.v, b.v, _CMP_EQ_OQ)}; }
TOPG_INLINE Mask less(F32 a, F32 b) { return {_mm512_cmp_ps_mask(a.v, b.v, _CMP_LT_OQ)}; }
TOPG_INLINE Mask is_nan(F32 a) { return {_mm512_cmp_ps_mask(a.v, a.v, _CMP_UNORD_Q)}; }
TOPG_INLINE Mask first_lanes(int count) {  // lanes 0 .. count - 1; count may lie outside 0..16
  return {__mmask16(count >= 16 ? 0xffff : count <= 0 ? 0 : (1u << count) - 1)};
}
TOPG_INLINE Mask operator&(Mask a, Mask b) { return {__mmask16(a.v & b.v)}; }
TOPG_INLINE Mask without(Mask a, Mask b) { return {__mmask16(a.v & ~b.v)}; }  // lanes of a that are not in b
TOPG_INLINE bool any(Mask a) { return a.v != 0; }
TOPG_INLINE int first_lane(Mask a) { return __builtin_ctz(a.v); }  // the lowest lane of a mask that has any
TOPG_INLINE F32 select(Mask m, F32 yes, F32 no) { return {_mm512_mask_blend_ps(m.v, no.v, yes.v)}; }

TOPG_INLINE I32 operator+(I32 a, I32 b) { return {_mm512_add_epi32(a.v, b.v)}; }
TOPG_INLINE I32 operator-(I32 a, I32 b) { return {_mm512_sub_epi32(a.v, b.v)}; }
TOPG_INLINE I32 max(I32 a, I32 b) { return {_mm512_max_epi32(a.v, b.v)}; }
TOPG_INLINE F32 to_float(I32 a) { return {_mm512_cvtepi32_ps(a.v)}; }
TOPG_INLINE I32 to_int(F32 a) { return {_mm512_cvtps_epi32(a.v)}; }  // rounds half to even
TOPG_INLINE I32 bits(F32 a) { return {_mm512_castps_si512(a.v)}; }
TOPG_INLINE F32 from_bits(I32 a) { return {_mm512_castsi512_ps(a.v)}; }
template <int N>
TOPG_INLINE I32 shift_left(I32 a) {
  return {_mm512_slli_epi32(a.v, N)};
}

// Sums in a fixed tree, whatever the instruction set: lane i and i + 8, then i + 4, i + 2, i + 1.
TOPG_INLINE float sum(F32 a) {
  __m256 h = _mm256_add_ps(_mm512_castps512_ps256(a.v), _mm512_extractf32x8_ps(a.v, 1));
  __m128 q = _mm_add_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
  q = _mm_add_ps(q, _mm_movehl_ps(q, q));
  return _mm_cvtss_f32(_mm_add_ss(q, _mm_movehdup_ps(q)));
}
TOPG_INLINE float largest(F32 a) { return _mm512_reduce_max_ps(a.v); }
TOPG_INLINE int32_t largest(I32 a) { return _mm512_reduce_max_epi32(a.v); }
TOPG_INLINE int32_t sum(I32 a) { return _mm512_reduce_add_epi32(a.v); }

// x[i] = x[i] + x[i ^ N], or x[i ^ N] - x[i] where bit N of i is set: one butterfly of a Walsh-Hadamard transform.
template <int N>
TOPG_INLINE F32 butterfly(F32 a) {
  const __m512 other = N == 1   ? _mm512_permute_ps(a.v, 0xB1)
                       : N == 2 ? _mm512_permute_ps(a.v, 0x4E)
                       : N == 4 ? _mm512_shuffle_f32x4(a.v, a.v, 0xB1)
                                : _mm512_shuffle_f32x4(a.v, a.v, 0x4E);
  // A multiplication by 1 or -1 rounds nothing: one instruction adds and subtracts.
  constexpr float s1 = N == 1 ? -1 : 1, s2 = N == 2 ? -1 : 1, s4 = N == 4 ? -1 : 1, s8 = N == 8 ? -1 : 1;
  const __m512 sign = _mm512_setr_ps(1, s1, s2, s1 * s2, s4, s4 * s1, s4 * s2, s4 * s1 * s2, s8, s8 * s1, s8 * s2,
                                     s8 * s1 * s2, s8 * s4, s8 * s4 * s1, s8 * s4 * s2, s8 * s4 * s1 * s2);
  return {_mm512_fmadd_ps(a.v, sign, other)};
}

TOPG_INLINE F32 load_bfloat16(const uint16_t* p) {
  return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16))};
}
TOPG_INLINE F32 load_float16(const uint16_t* p) { return {_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p))}; }
TOPG_INLINE F32 load_int8(const int8_t* p) {
  return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)))};
}
TOPG_INLINE __m256i rounded_bfloat16(F32 x) {
#if defined(__AVX512BF16__)
  return (__m256i)_mm512_cvtneps_pbh(x.v);
#else
  const __m512i b = _mm512_castps_si512(x.v), upper = _mm512_srli_epi32(b, 16);
  // Half of the last kept place, less one where that place is even, carries into it exactly when rounding up is due.
  const __m512i odd = _mm512_and_si512(upper, _mm512_set1_epi32(1));
  const __m512i carried = _mm512_add_epi32(_mm512_add_epi32(b, _mm512_set1_epi32(0x7fff)), odd);
  const __m512i quiet_nan = _mm512_or_si512(upper, _mm512_set1_epi32(0x40));
  return _mm512_cvtepi32_epi16(_mm512_mask_mov_epi32(_mm512_srli_epi32(carried, 16), is_nan(x).v, quiet_nan));
#endif
}
TOPG_INLINE void store_bfloat16(uint16_t* p, F32 x) {  // rounds to nearest even; NaN stays NaN
  _mm256_storeu_si256((__m256i*)p, rounded_bfloat16(x));
}
TOPG_INLINE void store_bfloat16(uint16_t* p, F32 a, F32 b) {  // 32 of them, in one store
#if defined(__AVX512BF16__)
  _mm512_storeu_si512(p, (__m512i)_mm512_cvtne2ps_pbh(b.v, a.v));
#else
  _mm512_storeu_si512(p, _mm512_inserti64x4(_mm512_castsi256_si512(rounded_bfloat16(a)), rounded_bfloat16(b), 1));
#endif
}
TOPG_INLINE void store_int8(int8_t* p, I32 x) {  // saturates
  _mm_storeu_si128((__m128i*)p, _mm512_cvtsepi32_epi8(x.v));
}
TOPG_INLINE void store_uint8(uint8_t* p, I32 x) {  // of what is not negative; saturates
  _mm_storeu_si128((__m128i*)p, _mm512_cvtusepi32_epi8(x.v));
}
// Packing works within quarters of registers: 4 codes of each of four vectors come out, and so on.
TOPG_INLINE __m512i ordered_quads(__m512i codes) {
  const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  return _mm512_permutexvar_epi32(order, codes);
}
TOPG_INLINE void store_int8(int8_t* p, I32 a, I32 b, I32 c, I32 d) {  // 64 codes, saturated
  const __m512i codes = _mm512_packs_epi16(_mm512_packs_epi32(a.v, b.v), _mm512_packs_epi32(c.v, d.v));
  _mm512_storeu_si512(p, ordered_quads(codes));
}
// Of a and b to p, of c and d to q.
TOPG_INLINE void store_uint8(uint8_t* p, uint8_t* q, I32 a, I32 b, I32 c, I32 d) {
  const __m512i packed = _mm512_packus_epi16(_mm512_packs_epi32(a.v, b.v), _mm512_packs_epi32(c.v, d.v));
  const __m512i codes = ordered_quads(packed);
  _mm256_storeu_si256((__m256i*)p, _mm512_castsi512_si256(codes));
  _mm256_storeu_si256((__m256i*)q, _mm512_extracti64x4_epi64(codes, 1));
}

// acc[i] += sum over j of unsigned[4 i + j] * signed[4 i + j], exact in int32.  Both point at 64 bytes.
TOPG_INLINE I32 dot4(I32 acc, I32 unsigned_bytes, I32 signed_bytes) {
  typedef int V16 __attribute__((vector_size(64)));
  // The builtin on a vector of ints: GCC 12 spills with the intrinsic on __m512i arrays.
  return {(__m512i)__builtin_ia32_vpdpbusd_v16si((V16)acc.v, (V16)unsigned_bytes.v, (V16)signed_bytes.v)};
}
TOPG_INLINE I32 load_bytes(const void* p) { return {_mm512_loadu_si512(p)}; }
TOPG_INLINE I32 splat_bytes(const void* p) { return {_mm512_set1_epi32(*(const int32_t*)p)}; }  // the same 4 bytes in every lane
// Of each byte.
TOPG_INLINE I32 low_nibbles(I32 a) { return {_mm512_and_si512(a.v, _mm512_set1_epi8(15))}; }
TOPG_INLINE I32 high_nibbles(I32 a) { return low_nibbles({_mm512_srli_epi32(a.v, 4)}); }
// The first and the second of each lane's pair of bfloat16.
TOPG_INLINE F32 low_bfloat16(I32 a) { return {_mm512_castsi512_ps(_mm512_slli_epi32(a.v, 16))}; }
TOPG_INLINE F32 high_bfloat16(I32 a) {
  return {_mm512_castsi512_ps(_mm512_and_si512(a.v, _mm512_set1_epi32(int32_t(0xffff0000))))};
}
// acc[i] += a[2 i] * b[2 i] + a[2 i + 1] * b[2 i + 1] of bfloat16 pairs.
TOPG_INLINE F32 dot2(F32 acc, I32 a, I32 b) {
#if defined(__AVX512BF16__)
  return {_mm512_dpbf16_ps(acc.v, (__m512bh)a.v, (__m512bh)b.v)};
#else
  return fma(low_bfloat16(a), low_bfloat16(b), fma(high_bfloat16(a), high_bfloat16(b), acc));
#endif
}

}  // namespace
}  // namespace topg
