// Vectors of 16 lanes for any processor, in quads that compilers map to SSE2, NEON or the like.
#pragma once

#include "kernels/simd_common.h"

namespace topg {
namespace {

typedef float FloatQuad __attribute__((vector_size(16)));
typedef int32_t IntQuad __attribute__((vector_size(16)));

#if defined(__aarch64__)
constexpr int kRegisterVectors = 8;  // vectors that the processor's registers hold
#else
constexpr int kRegisterVectors = 4;
#endif

struct F32 {  // 16 float32
  FloatQuad v[4];
};
struct I32 {  // 16 int32
  IntQuad v[4];
};
struct Mask {  // all bits of a lane, or none
  IntQuad v[4];
};

// Vector whose quad i is function(i).
template <class Vector, class Function>
TOPG_INLINE Vector each_quad(Function function) {
  return {{function(0), function(1), function(2), function(3)}};
}

// Quad by quad: a whole vector copied at once would go through memory.
template <class Quad>
TOPG_INLINE Quad load_quad(const void* p) {
  Quad quad;
  __builtin_memcpy(&quad, p, sizeof(quad));
  return quad;
}
TOPG_INLINE F32 load(const float* p) {
  return each_quad<F32>([&](int i) TOPG_INLINE_LAMBDA { return load_quad<FloatQuad>(p + 4 * i); });
}
TOPG_INLINE void store(float* p, F32 x) {
  for (int i = 0; i < 4; ++i) __builtin_memcpy(p + 4 * i, &x.v[i], sizeof(x.v[i]));
}
TOPG_INLINE F32 splat(float x) {
  const FloatQuad quad = {x, x, x, x};
  return {{quad, quad, quad, quad}};
}
TOPG_INLINE I32 splat(int32_t x) {
  const IntQuad quad = {x, x, x, x};
  return {{quad, quad, quad, quad}};
}
TOPG_INLINE F32 zero() { return splat(0.0f); }
TOPG_INLINE F32 load_first(const float* p, int count) {
  float lanes[16] = {};
  __builtin_memcpy(lanes, p, size_t(count) * sizeof(float));
  return load(lanes);
}
TOPG_INLINE void store_first(float* p, F32 x, int count) {
  float lanes[16];
  store(lanes, x);
  __builtin_memcpy(p, lanes, size_t(count) * sizeof(float));
}

TOPG_INLINE I32 bits(F32 a) {
  return each_quad<I32>([&](int i) TOPG_INLINE_LAMBDA { return (IntQuad)a.v[i]; });
}
TOPG_INLINE F32 from_bits(I32 a) {
  return each_quad<F32>([&](int i) TOPG_INLINE_LAMBDA { return (FloatQuad)a.v[i]; });
}
TOPG_INLINE I32 to_bits(Mask m) { return {{m.v[0], m.v[1], m.v[2], m.v[3]}}; }

TOPG_INLINE F32 operator+(F32 a, F32 b) {
  return each_quad<F32>([&](int i) TOPG_INLINE_LAMBDA { return a.v[i] + b.v[i]; });
}
TOPG_INLINE F32 operator-(F32 a, F32 b) {
  return each_quad<F32>([&](int i) TOPG_INLINE_LAMBDA { return a.v[i] - b.v[i]; });
}
TOPG_INLINE F32 operator*(F32 a, F32 b) {
  return each_quad<F32>([&](int i) TOPG_INLINE_LAMBDA { return a.v[i] * b.v[i]; });
}
TOPG_INLINE F32 operator/(F32 a, F32 b) {
  return each_quad<F32>([&](int i) TOPG_INLINE_LAMBDA { return a.v[i] / b.v[i]; });
}
TOPG_INLINE I32 operator+(I32 a, I32 b) {
  return each_quad<I32>([&](int i) TOPG_INLINE_LAMBDA { return a.v[i] + b.v[i]; });
}
TOPG_INLINE I32 operator-(I32 a, I32 b) {
  return each_quad<I32>([&](int i) TOPG_INLINE_LAMBDA { return a.v[i] - b.v[i]; });
}

TOPG_INLINE FloatQuad fma_quad(FloatQuad a, FloatQuad b, FloatQuad c) {
#if defined(__FP_FAST_FMAF)
  return FloatQuad{__builtin_fmaf(a[0], b[0], c[0]), __builtin_fmaf(a[1], b[1], c[1]), __builtin_fmaf(a[2], b[2], c[2]),
                   __builtin_fmaf(a[3], b[3], c[3])};
#else
  // The product is exact in double.  Rounding the sum twice differs from fma once in some 2^29 cases; fmaf of the library
  // would not, at ten times the cost.
  typedef float FloatPair __attribute__((vector_size(8)));
  typedef double DoublePair __attribute__((vector_size(16)));
  const auto half = [&](FloatPair x, FloatPair y, FloatPair z) TOPG_INLINE_LAMBDA {
    const DoublePair sum = __builtin_convertvector(x, DoublePair) * __builtin_convertvector(y, DoublePair) +
                           __builtin_convertvector(z, DoublePair);
    return __builtin_convertvector(sum, FloatPair);
  };
  FloatPair parts[3][2];  // copied: GCC 12 crashes over pairs taken from quads lane by lane in some loops
  __builtin_memcpy(parts[0], &a, sizeof(a));
  __builtin_memcpy(parts[1], &b, sizeof(b));
  __builtin_memcpy(parts[2], &c, sizeof(c));
  const FloatPair low = half(parts[0][0], parts[1][0], parts[2][0]), high = half(parts[0][1], parts[1][1], parts[2][1]);
  return FloatQuad{low[0], low[1], high[0], high[1]};
#endif
}
TOPG_INLINE F32 fma(F32 a, F32 b, F32 c) {  // a * b + c, rounded once
  return each_quad<F32>([&](int i) TOPG_INLINE_LAMBDA { return fma_quad(a.v[i], b.v[i], c.v[i]); });
}

TOPG_INLINE Mask less(F32 a, F32 b) {
  return each_quad<Mask>([&](int i) TOPG_INLINE_LAMBDA { return (IntQuad)(a.v[i] < b.v[i]); });
}
TOPG_INLINE Mask equal(F32 a, F32 b) {
  return each_quad<Mask>([&](int i) TOPG_INLINE_LAMBDA { return (IntQuad)(a.v[i] == b.v[i]); });
}
TOPG_INLINE Mask is_nan(F32 a) {
  return each_quad<Mask>([&](int i) TOPG_INLINE_LAMBDA { return (IntQuad)(a.v[i] != a.v[i]); });
}
TOPG_INLINE Mask first_lanes(int count) {  // lanes 0 .. count - 1; count may lie outside 0..16
  return each_quad<Mask>([&](int i) TOPG_INLINE_LAMBDA {
    const IntQuad lane = {4 * i, 4 * i + 1, 4 * i + 2, 4 * i + 3};
    return (IntQuad)(lane < count);
  });
}
TOPG_INLINE Mask operator&(Mask a, Mask b) {
  return each_quad<Mask>([&](int i) TOPG_INLINE_LAMBDA { return a.v[i] & b.v[i]; });
}
TOPG_INLINE Mask without(Mask a, Mask b) {  // lanes of a that are not in b
  return each_quad<Mask>([&](int i) TOPG_INLINE_LAMBDA { return a.v[i] & ~b.v[i]; });
}
TOPG_INLINE bool any(Mask a) {
  const IntQuad all = (a.v[0] | a.v[1]) | (a.v[2] | a.v[3]);
  return (all[0] | all[1] | all[2] | all[3]) != 0;
}
TOPG_INLINE int first_lane(Mask a) {  // the lowest lane of a mask that has any
  int lane = 0;
  while (a.v[lane / 4][lane % 4] == 0) ++lane;
  return lane;
}
TOPG_INLINE F32 select(Mask m, F32 yes, F32 no) {
  return each_quad<F32>([&](int i) TOPG_INLINE_LAMBDA {
    return (FloatQuad)((m.v[i] & (IntQuad)yes.v[i]) | (~m.v[i] & (IntQuad)no.v[i]));
  });
}

TOPG_INLINE F32 abs(F32 a) {
  return each_quad<F32>([&](int i) TOPG_INLINE_LAMBDA { return (FloatQuad)((IntQuad)a.v[i] & 0x7fffffff); });
}
TOPG_INLINE F32 sqrt(F32 a) {
  return each_quad<F32>([&](int i) TOPG_INLINE_LAMBDA {
    return FloatQuad{__builtin_sqrtf(a.v[i][0]), __builtin_sqrtf(a.v[i][1]), __builtin_sqrtf(a.v[i][2]),
                     __builtin_sqrtf(a.v[i][3])};
  });
}
// When a lane of either is NaN the result is b's lane: put what may be NaN second to keep it.
TOPG_INLINE F32 max(F32 a, F32 b) { return select(less(b, a), a, b); }
TOPG_INLINE F32 min(F32 a, F32 b) { return select(less(a, b), a, b); }
TOPG_INLINE I32 max(I32 a, I32 b) {
  return each_quad<I32>([&](int i) TOPG_INLINE_LAMBDA {
    const IntQuad greater = a.v[i] > b.v[i];
    return (a.v[i] & greater) | (b.v[i] & ~greater);
  });
}

TOPG_INLINE F32 to_float(I32 a) {
  return each_quad<F32>([&](int i) TOPG_INLINE_LAMBDA { return __builtin_convertvector(a.v[i], FloatQuad); });
}
// Rounds half to even; for values below 2^22 in magnitude.
TOPG_INLINE I32 to_int(F32 a) {
  const float round = 12582912.0f;  // 1.5 * 2^23: the sum has no room for a fraction
  return bits(a + splat(round)) - bits(splat(round));
}
template <int N>
TOPG_INLINE I32 shift_left(I32 a) {
  return each_quad<I32>([&](int i) TOPG_INLINE_LAMBDA { return a.v[i] << N; });
}

// Sums in a fixed tree, whatever the instruction set: lane i and i + 8, then i + 4, i + 2, i + 1.
TOPG_INLINE float sum(F32 a) {
  const FloatQuad quad = (a.v[0] + a.v[2]) + (a.v[1] + a.v[3]);
  return (quad[0] + quad[2]) + (quad[1] + quad[3]);
}
TOPG_INLINE int32_t sum(I32 a) {
  const IntQuad quad = (a.v[0] + a.v[2]) + (a.v[1] + a.v[3]);
  return quad[0] + quad[2] + quad[1] + quad[3];
}
TOPG_INLINE float largest(F32 a) {
  float lanes[16], best;
  store(lanes, a);
  best = lanes[0];
  for (int i = 1; i < 16; ++i) best = lanes[i] > best ? lanes[i] : best;
  return best;
}
TOPG_INLINE int32_t largest(I32 a) {
  int32_t lanes[16], best;
  __builtin_memcpy(lanes, &a, sizeof(a));
  best = lanes[0];
  for (int i = 1; i < 16; ++i) best = lanes[i] > best ? lanes[i] : best;
  return best;
}

// x[i] = x[i] + x[i ^ N], or x[i ^ N] - x[i] where bit N of i is set: one butterfly of a Walsh-Hadamard transform.
template <int N>
TOPG_INLINE F32 butterfly(F32 a) {
  if constexpr (N >= 4) {
    return each_quad<F32>([&](int i) TOPG_INLINE_LAMBDA {
      const FloatQuad other = a.v[i ^ (N / 4)];
      return i & (N / 4) ? other - a.v[i] : other + a.v[i];
    });
  } else {
    return each_quad<F32>([&](int i) TOPG_INLINE_LAMBDA {
      const FloatQuad x = a.v[i];
      if constexpr (N == 1) {
        return FloatQuad{x[0] + x[1], x[0] - x[1], x[2] + x[3], x[2] - x[3]};
      } else {
        return FloatQuad{x[0] + x[2], x[1] + x[3], x[0] - x[2], x[1] - x[3]};
      }
    });
  }
}

TOPG_INLINE I32 load_bytes(const void* p) {
  return each_quad<I32>([&](int i) TOPG_INLINE_LAMBDA { return load_quad<IntQuad>((const char*)p + 16 * i); });
}
TOPG_INLINE I32 splat_bytes(const void* p) {  // the same 4 bytes in every lane
  int32_t word;
  __builtin_memcpy(&word, p, sizeof(word));
  return splat(word);
}

template <class Number, class Convert>
TOPG_INLINE I32 load_converted(const Number* p, Convert convert) {
  int32_t lanes[16];  // GCC 12 crashes on vectors composed of converted elements, in loops
  for (int i = 0; i < 16; ++i) lanes[i] = convert(p[i]);
  return load_bytes(lanes);
}
TOPG_INLINE F32 load_bfloat16(const uint16_t* p) {
  return from_bits(load_converted(p, [](uint16_t x) TOPG_INLINE_LAMBDA { return int32_t(uint32_t(x) << 16); }));
}
TOPG_INLINE F32 load_int8(const int8_t* p) {
  return to_float(load_converted(p, [](int8_t x) TOPG_INLINE_LAMBDA { return int32_t(x); }));
}
TOPG_INLINE F32 load_float16(const uint16_t* p) {
  const I32 half = load_converted(p, [](uint16_t x) TOPG_INLINE_LAMBDA { return int32_t(x); });
  return each_quad<F32>([&](int i) TOPG_INLINE_LAMBDA {
    const IntQuad magnitude = (half.v[i] & 0x7fff) << 13;  // exponent and mantissa where float32 has them
    const IntQuad exponent = magnitude & (31 << 23);
    // The exponent's bias grows from 15 to 127, that of infinity and NaN to 255.
    const IntQuad normal = magnitude + (112 << 23) + ((IntQuad)(exponent == (31 << 23)) & (112 << 23));
    // A subnormal m * 2^-24 is (2^-14 + m * 2^-24) - 2^-14, all of them normal float32 numbers.
    const IntQuad smallest = {113 << 23, 113 << 23, 113 << 23, 113 << 23};
    const IntQuad subnormal = (IntQuad)((FloatQuad)(magnitude + smallest) - (FloatQuad)smallest);
    const IntQuad is_subnormal = (IntQuad)(exponent == 0);
    const IntQuad sign = (half.v[i] & 0x8000) << 16;
    return (FloatQuad)((is_subnormal & subnormal) | (~is_subnormal & normal) | sign);
  });
}
TOPG_INLINE void store_bfloat16(uint16_t* p, F32 x) {  // rounds to nearest even; NaN stays NaN
  const I32 all = bits(x);
  const Mask nan = is_nan(x);
  const I32 rounded = each_quad<I32>([&](int i) TOPG_INLINE_LAMBDA {
    const IntQuad b = all.v[i];
    // Half of the last kept place, less one where that place is even, carries into it exactly when rounding up is due.
    const IntQuad carried = (b + 0x7fff + ((b >> 16) & 1)) >> 16;
    return (nan.v[i] & ((b >> 16) | 0x40)) | (~nan.v[i] & carried);
  });
  for (int lane = 0; lane < 16; ++lane) p[lane] = uint16_t(rounded.v[lane / 4][lane % 4]);
}
TOPG_INLINE void store_bfloat16(uint16_t* p, F32 a, F32 b) {
  store_bfloat16(p, a);
  store_bfloat16(p + 16, b);
}
TOPG_INLINE void store_int8(int8_t* p, I32 x) {  // saturates
  for (int lane = 0; lane < 16; ++lane) {
    const int32_t value = x.v[lane / 4][lane % 4];
    p[lane] = int8_t(value < -128 ? -128 : value > 127 ? 127 : value);
  }
}

TOPG_INLINE void store_uint8(uint8_t* p, I32 x) {  // of what is not negative; saturates
  for (int lane = 0; lane < 16; ++lane) {
    const int32_t value = x.v[lane / 4][lane % 4];
    p[lane] = uint8_t(value > 255 ? 255 : value);
  }
}

TOPG_INLINE void store_int8(int8_t* p, I32 a, I32 b, I32 c, I32 d) {  // 64 codes, saturated
  store_int8(p, a);
  store_int8(p + 16, b);
  store_int8(p + 32, c);
  store_int8(p + 48, d);
}
// Of a and b to p, of c and d to q.
TOPG_INLINE void store_uint8(uint8_t* p, uint8_t* q, I32 a, I32 b, I32 c, I32 d) {
  store_uint8(p, a);
  store_uint8(p + 16, b);
  store_uint8(q, c);
  store_uint8(q + 16, d);
}

// acc[i] += sum over j of unsigned[4 i + j] * signed[4 i + j], exact in int32.  Both point at 64 bytes.
TOPG_INLINE I32 dot4(I32 acc, I32 unsigned_bytes, I32 signed_bytes) {
  return each_quad<I32>([&](int i) TOPG_INLINE_LAMBDA {
    const IntQuad u = unsigned_bytes.v[i], s = signed_bytes.v[i];
    return acc.v[i] + (u & 0xff) * ((s << 24) >> 24) + ((u >> 8) & 0xff) * ((s << 16) >> 24) +
           ((u >> 16) & 0xff) * ((s << 8) >> 24) + ((u >> 24) & 0xff) * (s >> 24);
  });
}
// Of each byte.
TOPG_INLINE I32 low_nibbles(I32 a) {
  return each_quad<I32>([&](int i) TOPG_INLINE_LAMBDA { return (IntQuad)(a.v[i] & 0x0f0f0f0f); });
}
TOPG_INLINE I32 high_nibbles(I32 a) {
  return each_quad<I32>([&](int i) TOPG_INLINE_LAMBDA { return (IntQuad)((a.v[i] >> 4) & 0x0f0f0f0f); });
}
// The first and the second of each lane's pair of bfloat16.
TOPG_INLINE F32 low_bfloat16(I32 a) { return from_bits(shift_left<16>(a)); }
TOPG_INLINE F32 high_bfloat16(I32 a) {
  return each_quad<F32>([&](int i) TOPG_INLINE_LAMBDA { return (FloatQuad)(a.v[i] & int32_t(0xffff0000)); });
}
// acc[i] += a[2 i] * b[2 i] + a[2 i + 1] * b[2 i + 1] of bfloat16 pairs.
TOPG_INLINE F32 dot2(F32 acc, I32 a, I32 b) {
  return fma(low_bfloat16(a), low_bfloat16(b), fma(high_bfloat16(a), high_bfloat16(b), acc));
}

}  // namespace
}  // namespace topg
