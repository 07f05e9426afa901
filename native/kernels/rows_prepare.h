// Rows of a linear's input, turned into the form its kernel multiplies (RowKernels::prepare).
#pragma once

#include "kernels/kernels.h"
#include "kernels/simd.h"

namespace topg {
namespace {

constexpr int kRunVectors = kRotationGroup / kLanes;

// The orthonormal Walsh-Hadamard transform of 64 columns: strides 1, 2, ..., 32 in this order, then one multiplication by 1/8.
TOPG_INLINE void rotate_run(F32* x) {
  unroll<kRunVectors>([&](auto i) TOPG_INLINE_LAMBDA {
    x[i] = butterfly<8>(butterfly<4>(butterfly<2>(butterfly<1>(x[i]))));
  });
  const F32 low_sum = x[0] + x[1], low_difference = x[0] - x[1];
  const F32 high_sum = x[2] + x[3], high_difference = x[2] - x[3];
  const F32 eighth = splat(0.125f);
  x[0] = (low_sum + high_sum) * eighth;
  x[1] = (low_difference + high_difference) * eighth;
  x[2] = (low_sum - high_sum) * eighth;
  x[3] = (low_difference - high_difference) * eighth;
}

// Vectors of x, of which only the first `count` columns exist: zeros follow.
template <int kVectors>
TOPG_INLINE void load_padded(const float* x, int count, F32* out) {
  unroll<kVectors>([&](auto i) TOPG_INLINE_LAMBDA {
    const int left = count - i * kLanes;
    out[i] = left >= kLanes ? load(x + i * kLanes) : left > 0 ? load_first(x + i * kLanes, left) : zero();
  });
}

// ---- int8 ---------------------------------------------------------------------------------------------------------------

// Where the codes of a row's columns go, and the scales and sums of its dot groups.
struct QuantisedRow {
  int8_t* codes;
  float* scales;
  int32_t* sums;
};

struct GroupScale {
  float scale, inverse;  // x is about scale * code, code = x * inverse rounded
};

// Of a group whose largest magnitude is amax, finite.  Where the scale would not be a normal number all codes are 0: its
// reciprocal could be infinite.
TOPG_INLINE GroupScale group_scale(float amax) {
  const bool usable = amax >= 127 * 0x1p-126f;
  return {usable ? amax / 127 : 0.0f, usable ? 127 / amax : 0.0f};
}

// The result for a group of `columns` with an input that is not finite.
inline void poison_group(int columns, int dot_groups, const QuantisedRow& out) {
  __builtin_memset(out.codes, 0, size_t(columns));
  for (int dot = 0; dot < dot_groups; ++dot) {
    out.scales[dot] = __builtin_nanf("");
    out.sums[dot] = 0;
  }
}

// The sum of codes already stored: exact, all partial sums are whole numbers below 2^24.
TOPG_INLINE int32_t sum_of_codes(const int8_t* codes, int columns) {
  F32 total = zero();
  for (int i = 0; i < columns; i += kLanes) total = total + load_int8(codes + i);
  return int32_t(sum(total));
}

template <int kVectors>
TOPG_INLINE void store_codes(int8_t* out, const I32* codes) {
  if constexpr (kVectors % 4 == 0) {
    unroll<kVectors / 4>([&](auto i) TOPG_INLINE_LAMBDA {
      store_int8(out + i * 4 * kLanes, codes[4 * i], codes[4 * i + 1], codes[4 * i + 2], codes[4 * i + 3]);
    });
  } else {
    unroll<kVectors>([&](auto i) TOPG_INLINE_LAMBDA { store_int8(out + i * kLanes, codes[i]); });
  }
}

// One group of activations, of kVectors vectors; its dot groups share the scale and have sums of their own.
template <int kVectors>
TOPG_INLINE void quantise_group(const F32* x, int dot_columns, const QuantisedRow& out) {
  constexpr int32_t kInfinity = 0x7f800000;
  constexpr int kColumns = kVectors * kLanes;
  // As integers, magnitudes compare like numbers, and a NaN is larger than infinity.
  I32 peaks = splat(0);
  unroll<kVectors>([&](auto i) TOPG_INLINE_LAMBDA { peaks = max(peaks, bits(abs(x[i]))); });
  const int32_t peak = largest(peaks);
  if (__builtin_expect(peak >= kInfinity, 0)) return poison_group(kColumns, kColumns / dot_columns, out);
  float amax;
  __builtin_memcpy(&amax, &peak, sizeof(amax));
  const GroupScale group = group_scale(amax);
  // x * (127 / amax) is within 127 * 1.5 * 2^-23 of x / scale: a code differs from the exactly divided one only where that
  // lies so close to a half.  No product exceeds 127.5, so nothing has to be clamped.
  const F32 inverse = splat(group.inverse);
  I32 codes[kVectors], total = splat(0);
  unroll<kVectors>([&](auto i) TOPG_INLINE_LAMBDA {
    codes[i] = to_int(x[i] * inverse);
    total = total + codes[i];
  });
  store_codes<kVectors>(out.codes, codes);
  if (dot_columns == kColumns) {
    out.scales[0] = group.scale;
    out.sums[0] = sum(total);
    return;
  }
  for (int first = 0, dot = 0; first < kColumns; first += dot_columns, ++dot) {
    out.scales[dot] = group.scale;
    out.sums[dot] = sum_of_codes(out.codes + first, dot_columns);
  }
}

// Vectors of a span, the least number of columns that are whole groups and whole runs of the rotation.
constexpr int span_vectors(int group_vectors) { return group_vectors > kRunVectors ? group_vectors : kRunVectors; }

template <int kGroupVectors>
TOPG_INLINE void quantise_span(F32* x, const ActivationFormat& format, const QuantisedRow& out) {
  constexpr int kVectors = span_vectors(kGroupVectors);
  if (format.rotated) {
    unroll<kVectors / kRunVectors>([&](auto run) TOPG_INLINE_LAMBDA { rotate_run(x + run * kRunVectors); });
  }
  const int dot_groups = format.group / format.dot_group;
  unroll<kVectors / kGroupVectors>([&](auto group) TOPG_INLINE_LAMBDA {
    const QuantisedRow target = {out.codes + group * kGroupVectors * kLanes, out.scales + group * dot_groups,
                                 out.sums + group * dot_groups};
    quantise_group<kGroupVectors>(x + group * kGroupVectors, format.dot_group, target);
  });
}

// What is left of a row.
struct RowRest {
  const float* x;
  int columns;  // of x that exist; below 1 when only zeros follow
  int groups;   // dot groups that are wanted
  QuantisedRow out;

  TOPG_INLINE void advance(int done_columns, int done_groups) {
    x += done_columns, columns -= done_columns, groups -= done_groups;
    out = {out.codes + done_columns, out.scales + done_groups, out.sums + done_groups};
  }
};

// Whole spans.
template <int kGroupVectors>
TOPG_INLINE void quantise_whole(RowRest& rest, const ActivationFormat& format) {
  constexpr int kVectors = span_vectors(kGroupVectors), kColumns = kVectors * kLanes;
  const int groups = kColumns / format.dot_group;
  while (rest.columns >= kColumns && rest.groups >= groups) {
    F32 values[kVectors];
    unroll<kVectors>([&](auto i) TOPG_INLINE_LAMBDA { values[i] = load(rest.x + i * kLanes); });
    quantise_span<kGroupVectors>(values, format, rest.out);
    rest.advance(kColumns, groups);
  }
}

// The end of a row: zeros where there are no columns, and only as many results as there is room for.
template <int kGroupVectors>
void quantise_end(RowRest& rest, const ActivationFormat& format) {
  constexpr int kVectors = span_vectors(kGroupVectors), kColumns = kVectors * kLanes;
  while (rest.groups > 0) {
    F32 values[kVectors];
    int8_t codes[kColumns];
    float scales[kVectors];
    int32_t sums[kVectors];
    load_padded<kVectors>(rest.x, rest.columns, values);
    quantise_span<kGroupVectors>(values, format, {codes, scales, sums});
    const int span_groups = kColumns / format.dot_group;
    const int groups = rest.groups < span_groups ? rest.groups : span_groups;
    __builtin_memcpy(rest.out.codes, codes, size_t(groups) * format.dot_group);
    __builtin_memcpy(rest.out.scales, scales, size_t(groups) * sizeof(float));
    __builtin_memcpy(rest.out.sums, sums, size_t(groups) * sizeof(int32_t));
    rest.advance(kColumns, groups);
  }
}

template <int kGroupVectors>
void quantise_columns(RowRest rest, const ActivationFormat& format) {
  quantise_whole<kGroupVectors>(rest, format);
  quantise_end<kGroupVectors>(rest, format);
}

inline void quantise(const RowRest& row, const ActivationFormat& format) {
  switch (format.group / kLanes) {
    case 1: return quantise_columns<1>(row, format);
    case 2: return quantise_columns<2>(row, format);
    case 4: return quantise_columns<4>(row, format);
    case 8: return quantise_columns<8>(row, format);
    case 16: return quantise_columns<16>(row, format);
  }
}

// ---- float types --------------------------------------------------------------------------------------------------------

TOPG_INLINE void store_as(float* p, F32 x) { store(p, x); }
TOPG_INLINE void store_as(uint16_t* p, F32 x) { store_bfloat16(p, x); }

// `columns` of x exist; `wanted` are stored.
template <class Element>
void convert_columns(const float* x, int columns, bool rotated, int wanted, Element* out) {
  F32 values[kRunVectors];
  for (; wanted > 0; wanted -= kRotationGroup, columns -= kRotationGroup) {
    load_padded<kRunVectors>(x, columns, values);
    if (rotated) rotate_run(values);
    if (wanted >= kRotationGroup) {
      unroll<kRunVectors>([&](auto i) TOPG_INLINE_LAMBDA { store_as(out + i * kLanes, values[i]); });
    } else {
      Element last[kRotationGroup];
      unroll<kRunVectors>([&](auto i) TOPG_INLINE_LAMBDA { store_as(last + i * kLanes, values[i]); });
      __builtin_memcpy(out, last, size_t(wanted) * sizeof(Element));
    }
    x += kRotationGroup;
    out += kRotationGroup;
  }
}

// ---- entry points -------------------------------------------------------------------------------------------------------

inline void prepare_groups(const float* x, int columns, const Activations& out, int row, int first, int last) {
  const ActivationFormat& format = out.format;
  const int group_columns = format.dot_group != 0 ? format.dot_group : kRotationGroup;
  const ptrdiff_t first_column = ptrdiff_t(first) * group_columns;
  const int all = (last - first) * group_columns, left = int(out.columns - first_column);
  const int wanted = all < left ? all : left;
  switch (format.code) {
    case ActivationCode::kFloat32:
      return convert_columns(x, columns, format.rotated, wanted, out.row<float>(row) + first_column);
    case ActivationCode::kBFloat16:
      return convert_columns(x, columns, format.rotated, wanted, out.row<uint16_t>(row) + first_column);
    case ActivationCode::kInt8: {
      const ptrdiff_t first_group = ptrdiff_t(row) * out.groups + first;
      const QuantisedRow target = {out.row<int8_t>(row) + first_column, out.scales + first_group, out.sums + first_group};
      return quantise({x, columns, last - first, target}, format);
    }
  }
}

inline void prepare(const float* x, int columns, const Activations& out, int row) {
  const int group_columns = out.format.dot_group != 0 ? out.format.dot_group : kRotationGroup;
  prepare_groups(x, columns, out, row, 0, (out.columns + group_columns - 1) / group_columns);
}

}  // namespace
}  // namespace topg
