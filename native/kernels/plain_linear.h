// Linears whose weights are stored as numbers: float32, float16 and bfloat16.
//
// Every output is one sum over the columns in ascending order, whatever the tile's rows: a row's result does not depend on
// which rows it is computed with.
#pragma once

#include "kernels/kernels.h"
#include "kernels/simd.h"
#include "kernels/tile_prefetch.h"
#if defined(__AMX_BF16__)
#include "kernels/plain_linear_amx.h"
#endif

namespace topg {
namespace {

constexpr int kPlainMaxRows = 6;

// Vectors of channels that a tile keeps in registers: both of the block, if they fit beside weights and an activation.
constexpr int tile_vectors(int rows) { return 2 * rows + 3 <= kRegisterVectors ? 2 : 1; }

// ---- arithmetic of the formats ------------------------------------------------------------------------------------------
//
// kColumns columns of a block lie together, in kBytes.  load(p, half, pass) is what pass 0 .. kPasses - 1 over a tile's rows
// multiplies: one vector of 16 channels, of the first or the second half of the block.  Pass i starts at activation i.

struct Float32Weights {
  using Activation = float;
  static constexpr int kColumns = 1, kPasses = 1;
  static constexpr size_t kBytes = kBlockChannels * sizeof(float);

  static TOPG_INLINE F32 load(const uint8_t* p, int half, int) { return topg::load((const float*)p + half * kLanes); }
  static TOPG_INLINE F32 add_product(const float* x, F32 weights, F32 sum) { return fma(splat(*x), weights, sum); }
};

struct Float16Weights {
  using Activation = float;
  static constexpr int kColumns = 1, kPasses = 1;
  static constexpr size_t kBytes = kBlockChannels * sizeof(uint16_t);

  static TOPG_INLINE F32 load(const uint8_t* p, int half, int) { return load_float16((const uint16_t*)p + half * kLanes); }
  static TOPG_INLINE F32 add_product(const float* x, F32 weights, F32 sum) { return fma(splat(*x), weights, sum); }
};

// With instructions for bfloat16.
struct BFloat16Pairs {
  using Activation = uint16_t;
  static constexpr int kColumns = 2, kPasses = 1;
  static constexpr size_t kBytes = kColumns * kBlockChannels * sizeof(uint16_t);

  static TOPG_INLINE I32 load(const uint8_t* p, int half, int) { return load_bytes(p + half * kLanes * sizeof(int32_t)); }
  static TOPG_INLINE F32 add_product(const uint16_t* x, I32 weights, F32 sum) { return dot2(sum, splat_bytes(x), weights); }
};

// Without them: both sides as float32, the activations widened beforehand, the columns of a pair one after the other.
struct BFloat16Widened {
  using Activation = float;
  static constexpr int kColumns = 2, kPasses = 2;
  static constexpr size_t kBytes = kColumns * kBlockChannels * sizeof(uint16_t);

  static TOPG_INLINE F32 load(const uint8_t* p, int half, int pass) {
    const I32 pairs = load_bytes(p + half * kLanes * sizeof(int32_t));
    return pass == 0 ? low_bfloat16(pairs) : high_bfloat16(pairs);
  }
  static TOPG_INLINE F32 add_product(const float* x, F32 weights, F32 sum) { return fma(splat(*x), weights, sum); }
};

// ---- inner loops --------------------------------------------------------------------------------------------------------

template <class Weights, int kRows, int kVectors>
struct PlainTile {
  using Activation = typename Weights::Activation;

  F32 sums[kRows][kVectors];
  const uint8_t* weights;  // of the next column
  TilePrefetch prefetch;
  int first_half;

  TOPG_INLINE PlainTile(const TileArguments& a, int half) : weights(a.block), prefetch(a), first_half(half) {
    unroll<kRows>([&](auto r) TOPG_INLINE_LAMBDA {
      unroll<kVectors>([&](auto v) TOPG_INLINE_LAMBDA { sums[r][v] = zero(); });
    });
  }

  // The products of Weights::kColumns columns.
  TOPG_INLINE void add_unit(const Activation* x, ptrdiff_t stride, const uint8_t* unit) {
    unroll<Weights::kPasses>([&](auto pass) TOPG_INLINE_LAMBDA {
      decltype(Weights::load(unit, 0, 0)) weights_of[kVectors];
      unroll<kVectors>([&](auto v) TOPG_INLINE_LAMBDA { weights_of[v] = Weights::load(unit, first_half + v, pass); });
      unroll<kRows>([&](auto r) TOPG_INLINE_LAMBDA {
        unroll<kVectors>([&](auto v) TOPG_INLINE_LAMBDA {
          sums[r][v] = Weights::add_product(x + r * stride + pass, weights_of[v], sums[r][v]);
        });
      });
    });
  }

  TOPG_INLINE void add_columns(const Activation* x, ptrdiff_t stride, int columns) {
    for (; columns >= kStepColumns; columns -= kStepColumns) {
      prefetch.step();
      unroll<kStepColumns / Weights::kColumns>([&](auto i) TOPG_INLINE_LAMBDA {
        add_unit(x + i * Weights::kColumns, stride, weights + i * Weights::kBytes);
      });
      x += kStepColumns;
      weights += kStepColumns / Weights::kColumns * Weights::kBytes;
    }
    for (; columns > 0; columns -= Weights::kColumns) {
      add_unit(x, stride, weights);
      x += Weights::kColumns;
      weights += Weights::kBytes;
    }
  }

  TOPG_INLINE void store_to(float* out) const {
    unroll<kRows>([&](auto r) TOPG_INLINE_LAMBDA {
      unroll<kVectors>([&](auto v) TOPG_INLINE_LAMBDA {
        store(out + r * kBlockChannels + (first_half + v) * kLanes, sums[r][v]);
      });
    });
  }
};

// Adds all columns, a chunk of them at a time widened from bfloat16 into `chunk`.
template <class Tile, int kRows>
TOPG_INLINE void add_widened(Tile& tile, const Activations& x, int first_row) {
  constexpr int kChunkColumns = 256;
  alignas(64) float chunk[kRows][kChunkColumns];
  const uint16_t* row = x.row<uint16_t>(first_row);
  for (int first = 0; first < x.columns; first += kChunkColumns) {
    const int columns = x.columns - first < kChunkColumns ? x.columns - first : kChunkColumns;
    for (int r = 0; r < kRows; ++r) {
      // Whole vectors: rows are filled up to 64 bytes.
      for (int i = 0; i < columns; i += kLanes) store(chunk[r] + i, load_bfloat16(row + r * x.stride + first + i));
    }
    tile.add_columns(chunk[0], kChunkColumns, columns);
  }
}

template <class Weights, int kRows, int kVectors>
TOPG_INLINE void multiply_vectors(const TileArguments& a, int half) {
  PlainTile<Weights, kRows, kVectors> tile(a, half);
  if constexpr (__is_same(Weights, BFloat16Widened)) {
    add_widened<decltype(tile), kRows>(tile, *a.x, a.row);
  } else {
    tile.add_columns(a.x->row<typename Weights::Activation>(a.row), a.x->stride, a.x->columns);
  }
  tile.store_to(a.out);
}

template <class Weights, int kRows>
void multiply_rows(TileArguments a) {
  constexpr int kVectors = tile_vectors(kRows);
  for (int half = 0; half < 2; half += kVectors) {
    multiply_vectors<Weights, kRows, kVectors>(a, half);
    a.prefetch = nullptr;  // a second pass reads what the first one has read
  }
}

template <class Weights, int kRows = kPlainMaxRows>
void multiply_plain(const WeightFormat& format, const TileArguments& arguments) {
  if (arguments.rows == kRows) return multiply_rows<Weights, kRows>(arguments);
  if constexpr (kRows > 1) multiply_plain<Weights, kRows - 1>(format, arguments);
}

// ---- table --------------------------------------------------------------------------------------------------------------

inline LinearKernel bfloat16_linear() {
#if defined(__AMX_BF16__)
  return {"bfloat16 amx", kAmxRows, multiply_bfloat16_amx};
#elif defined(__AVX512BF16__)
  return {"bfloat16 pairs", kPlainMaxRows, multiply_plain<BFloat16Pairs>};
#else
  return {"bfloat16 widened", kPlainMaxRows, multiply_plain<BFloat16Widened>};
#endif
}

// The kernel of a format without groups; without a name when there is none.
inline LinearKernel plain_linear(const WeightFormat& format) {
  const bool float_activations = format.activation == ActivationCode::kFloat32;
  if (format.code == WeightCode::kFloat32 && float_activations) {
    return {"float32", kPlainMaxRows, multiply_plain<Float32Weights>};
  }
  if (format.code == WeightCode::kFloat16 && float_activations) {
    return {"float16", kPlainMaxRows, multiply_plain<Float16Weights>};
  }
  if (format.code == WeightCode::kBFloat16 && format.activation == ActivationCode::kBFloat16) return bfloat16_linear();
  return {};
}

}  // namespace
}  // namespace topg
