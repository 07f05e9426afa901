// Heads on their way into queries and KV tiles (layout.h draws a tile).
#pragma once

#include "kernels/attention_softmax.h"
#include "kernels/kernels.h"
#include "kernels/simd.h"

namespace topg {
namespace {


// Columns of one transform of a head: the largest power of two that divides head_dim.
constexpr int hadamard_size(int head_dim) { return head_dim & -head_dim; }

// The Walsh-Hadamard transform of n values in place, n a power of two; orthonormal but for a factor of 1 / sqrt(n).
inline void hadamard(float* x, int n) {
  int stride = 1;
  if (n >= kLanes) {
    for (int i = 0; i < n; i += kLanes) {
      store(x + i, butterfly<8>(butterfly<4>(butterfly<2>(butterfly<1>(load(x + i))))));
    }
    for (stride = kLanes; stride < n; stride *= 2) {
      for (int i = 0; i < n; i += 2 * stride) {
        for (int j = i; j < i + stride; j += kLanes) {
          const F32 a = load(x + j), b = load(x + j + stride);
          store(x + j, a + b);
          store(x + j + stride, a - b);
        }
      }
    }
  }
  for (; stride < n; stride *= 2) {
    for (int i = 0; i < n; i += 2 * stride) {
      for (int j = i; j < i + stride; ++j) {
        const float a = x[j], b = x[j + stride];
        x[j] = a + b;
        x[j + stride] = a - b;
      }
    }
  }
}

// The orthonormal transform of a head in runs; its own inverse.
inline void transform_head(float* head, int head_dim) {
  const int n = hadamard_size(head_dim);
  if (n == 1) return;
  const float scale = 1 / __builtin_sqrtf(float(n));
  for (int i = 0; i < head_dim; i += n) hadamard(head + i, n);
  int i = 0;
  for (; i + kLanes <= head_dim; i += kLanes) store(head + i, load(head + i) * splat(scale));
  for (; i < head_dim; ++i) head[i] *= scale;
}

// A head times `factor`, filled up with zeros; transformed for an int8 cache.
struct PaddedHead {
  alignas(64) float values[kMaxHeadDim];

  PaddedHead(const KVLayout& kv, const float* head, float factor) {
    values[0] = 0;  // for compilers that believe a head could be empty
    int i = 0;
    for (; i + kLanes <= kv.head_dim; i += kLanes) store(values + i, load(head + i) * splat(factor));
    if (i < kv.dim()) store(values + i, load_first(head + i, kv.head_dim - i) * splat(factor));
    if (kv.type == KVType::kInt8) transform_head(values, kv.head_dim);
  }
};

// Codes of a head with one scale for all of it.
struct HeadCodes {
  alignas(64) int8_t codes[kMaxHeadDim];
  float scale;
  int32_t sum;

  HeadCodes(const float* values, int dim) {
    I32 peaks = splat(0);
    for (int i = 0; i < dim; i += kLanes) peaks = max(peaks, bits(abs(load(values + i))));
    const int32_t peak = largest(peaks);  // as integers, magnitudes compare like numbers, and NaN is the largest
    float amax;
    __builtin_memcpy(&amax, &peak, sizeof(amax));
    const bool finite = peak < 0x7f800000, usable = finite && amax >= 127 * 0x1p-126f;
    scale = usable ? amax / 127 : finite ? 0.0f : __builtin_nanf("");
    const F32 inverse = splat(usable ? 127 / amax : 0.0f);
    I32 total = splat(0);
    for (int i = 0; i < dim; i += kLanes) {
      const I32 code = finite ? to_int(load(values + i) * inverse) : splat(0);
      store_int8(codes + i, code);
      total = total + code;
    }
    sum = topg::sum(total);
  }
};

inline void to_bfloat16(const float* values, int dim, uint16_t* out) {
  for (int i = 0; i < dim; i += kLanes) store_bfloat16(out + i, load(values + i));
}

// ---- queries ------------------------------------------------------------------------------------------------------------

// Place of a query head among those of its KV head: [kv_head][row][group].
inline ptrdiff_t query_index(const AttentionShape& shape, const Queries& queries, int row, int head) {
  const int group = shape.group();
  return (ptrdiff_t(head / group) * queries.rows + row) * group + head % group;
}

inline void store_query(const AttentionShape& shape, const float* head, const Queries& queries, int row, int head_index) {
  const KVLayout& kv = shape.kv;
  const ptrdiff_t index = query_index(shape, queries, row, head_index);
  // Without a soft cap, scores go straight into a power of two.
  const float factor = shape.softcap == 0 ? shape.scale * kLog2E : shape.scale;
  const PaddedHead padded(kv, head, factor);
  uint8_t* place = static_cast<uint8_t*>(queries.values) + index * kv.dim() * ptrdiff_t(kv.element_bytes());
  switch (kv.type) {
    case KVType::kFloat32: __builtin_memcpy(place, padded.values, size_t(kv.dim()) * sizeof(float)); return;
    case KVType::kBFloat16: return to_bfloat16(padded.values, kv.dim(), reinterpret_cast<uint16_t*>(place));
    case KVType::kInt8: {
      const HeadCodes codes(padded.values, kv.dim());
      __builtin_memcpy(place, codes.codes, size_t(kv.dim()));
      queries.scales[index] = codes.scale;
      queries.sums[index] = codes.sum;
    }
  }
}

// ---- keys and values ----------------------------------------------------------------------------------------------------

// Element i of `values` into column `token` of a tile [..][32 tokens].
inline void store_column(const uint32_t* values, int count, uint8_t* tile, int token) {
  uint32_t* out = reinterpret_cast<uint32_t*>(tile) + token;
  for (int i = 0; i < count; ++i) out[ptrdiff_t(i) * kTileKeys] = values[i];
}

inline void store_key(const AttentionShape& shape, const float* head, uint8_t* tile, int token) {
  const KVLayout& kv = shape.kv;
  const int dim = kv.dim();
  const PaddedHead padded(kv, head, 1.0f);
  alignas(64) uint32_t words[kMaxHeadDim];
  words[0] = 0;  // as above
  switch (kv.type) {
    case KVType::kFloat32:
      __builtin_memcpy(words, padded.values, size_t(dim) * sizeof(float));
      return store_column(words, dim, tile, token);
    case KVType::kBFloat16:
      to_bfloat16(padded.values, dim, reinterpret_cast<uint16_t*>(words));
      return store_column(words, dim / 2, tile, token);
    case KVType::kInt8: {
      const HeadCodes codes(padded.values, dim);
      __builtin_memcpy(words, codes.codes, size_t(dim));
      for (int i = 0; i < dim / 4; ++i) words[i] ^= 0x80808080u;  // code + 128
      store_column(words, dim / 4, tile, token);
      reinterpret_cast<float*>(tile + 2 * kv.half_tile_bytes())[token] = codes.scale;
    }
  }
}

inline void store_value(const AttentionShape& shape, const float* head, uint8_t* tile, int token) {
  const KVLayout& kv = shape.kv;
  const int dim = kv.dim();
  const PaddedHead padded(kv, head, 1.0f);
  uint8_t* values = tile + kv.half_tile_bytes();
  switch (kv.type) {
    case KVType::kFloat32:
      __builtin_memcpy(values + size_t(token) * size_t(dim) * sizeof(float), padded.values, size_t(dim) * sizeof(float));
      return;
    case KVType::kBFloat16: {
      alignas(64) uint16_t rounded[kMaxHeadDim];
      to_bfloat16(padded.values, dim, rounded);
      uint32_t* pairs = reinterpret_cast<uint32_t*>(values) + ptrdiff_t(token / 2) * dim;
      // The first token of a pair clears the second one's place.
      for (int i = 0; i < dim; ++i) {
        pairs[i] = token % 2 == 0 ? rounded[i] : (pairs[i] & 0xffffu) | (uint32_t(rounded[i]) << 16);
      }
      return;
    }
    case KVType::kInt8: {
      const HeadCodes codes(padded.values, dim);
      uint32_t* quads = reinterpret_cast<uint32_t*>(values) + ptrdiff_t(token / 4) * dim;
      const int shift = token % 4 * 8;
      const uint32_t before = (1u << shift) - 1;  // what earlier tokens stored; later places are cleared
      for (int i = 0; i < dim; ++i) quads[i] = (quads[i] & before) | (uint32_t(uint8_t(codes.codes[i])) << shift);
      reinterpret_cast<float*>(tile + 2 * kv.half_tile_bytes())[kTileKeys + token] = codes.scale;
    }
  }
}

}  // namespace
}  // namespace topg
