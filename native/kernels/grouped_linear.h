// Linears whose weights are stored as integer codes with scales per group of columns.
#pragma once

#include "kernels/grouped_format.h"
#include "kernels/grouped_weight_only.h"
#if defined(__AVX2__) && !defined(__AVX512F__)
#include "kernels/grouped_avx2.h"
#else
#include "kernels/grouped_tile.h"
#endif
#if defined(__AMX_INT8__)
#include "kernels/grouped_amx.h"
#endif

namespace topg {
namespace {

template <class Format>
LinearKernel int8_activation_kernel() {
#if defined(__AVX512F__)
#if defined(__AMX_INT8__)
  if constexpr (Format::kGroup == kInt8TileColumns) return {"grouped amx", kInt8MaxRows, multiply_grouped_amx<Format>};
#endif
  // 28 or 24 of 32 registers hold sums.
  constexpr int kRows = Format::kCode == WeightCode::kInt8 ? 7 : 6;
  return {"grouped dot4", kRows, multiply_grouped<Format, kRows>};
#elif defined(__AVX2__)
  return {"grouped words", kAvx2Rows, multiply_grouped_avx2<Format>};
#else
  return {"grouped generic", 1, multiply_grouped<Format, 1>};
#endif
}

// Formats are tried one after the other.
template <class Format, class... Others>
LinearKernel find_int8_activation_kernel(const WeightFormat& format) {
  if (format == Format::format(ActivationCode::kInt8)) return int8_activation_kernel<Format>();
  if constexpr (sizeof...(Others) != 0) return find_int8_activation_kernel<Others...>(format);
  return {};
}

template <ScaleType kScale, int kGroup, bool kMinimum = false>
using Int8Weights = GroupedFormat<WeightCode::kInt8, kScale, kGroup, kMinimum>;
template <ScaleType kScale, bool kMinimum = false>
using Int4Weights = GroupedFormat<WeightCode::kInt4, kScale, 32, kMinimum>;

// The kernel of a grouped format; without a name when there is none.
inline LinearKernel grouped_linear(const WeightFormat& format) {
  constexpr ScaleType kF32 = ScaleType::kFloat32, kF16 = ScaleType::kFloat16, kBF16 = ScaleType::kBFloat16;
  using WeightOnly = Int8Weights<kBF16, 64>;
  if (format == WeightOnly::format(ActivationCode::kBFloat16)) {
    return {"grouped widened", kWeightOnlyRows, multiply_weight_only<WeightOnly>};
  }
  return find_int8_activation_kernel<
      Int8Weights<kBF16, 64>, Int8Weights<kBF16, 32>, Int8Weights<kF16, 32>, Int8Weights<kF16, 32, true>,
      Int8Weights<kF32, 32, true>, Int8Weights<kF32, 16>, Int4Weights<kBF16>, Int4Weights<kF16>, Int4Weights<kF16, true>,
      Int4Weights<kF32>, Int4Weights<kF32, true>>(format);
}

}  // namespace
}  // namespace topg
