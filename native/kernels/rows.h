// Work on one row of float32: norms, activations, rotary embedding, argmax.
#pragma once

#include "kernels/kernels.h"
#include "kernels/rows_prepare.h"
#include "kernels/rows_unpack.h"
#include "kernels/simd.h"
#include "kernels/vector_math.h"

namespace topg {
namespace {

// ---- loops over vectors -------------------------------------------------------------------------------------------------

// How a loop's vector is read and written: whole, or its first lanes at the end of a row.
struct WholeVector {
  TOPG_INLINE F32 load(const float* p) const { return topg::load(p); }
  TOPG_INLINE void store(float* p, F32 x) const { topg::store(p, x); }
};
struct LastVector {
  int count;
  TOPG_INLINE F32 load(const float* p) const { return load_first(p, count); }
  TOPG_INLINE void store(float* p, F32 x) const { store_first(p, x, count); }
};

// function(i, lanes) for each vector, of columns i, i + 1, ..
template <class Function>
TOPG_INLINE void for_each_vector(int width, Function function) {
  int i = 0;
  for (; i + kLanes <= width; i += kLanes) function(i, WholeVector{});
  if (i < width) function(i, LastVector{width - i});
}

// Folds x into one number with add(partial sums, vector), in an order that the width alone decides.
template <class Add>
TOPG_INLINE float fold(const float* x, int width, Add add) {
  F32 partial[4] = {zero(), zero(), zero(), zero()};
  int i = 0;
  for (; i + 4 * kLanes <= width; i += 4 * kLanes) {
    for (int j = 0; j < 4; ++j) partial[j] = add(partial[j], load(x + i + j * kLanes));
  }
  for (; i + kLanes <= width; i += kLanes) partial[0] = add(partial[0], load(x + i));
  if (i < width) partial[1] = select(first_lanes(width - i), add(partial[1], load_first(x + i, width - i)), partial[1]);
  return sum((partial[0] + partial[1]) + (partial[2] + partial[3]));
}

// ---- norms --------------------------------------------------------------------------------------------------------------

// (x - mean) * factor * weight + bias; the vectors may be null.
TOPG_INLINE void normalise(const float* x, float mean, float factor, const float* weight, const float* bias, int width,
                           float* out) {
  for_each_vector(width, [&](int i, auto lanes) TOPG_INLINE_LAMBDA {
    F32 y = (lanes.load(x + i) - splat(mean)) * splat(factor);
    if (weight != nullptr) y = y * lanes.load(weight + i);
    if (bias != nullptr) y = y + lanes.load(bias + i);
    lanes.store(out + i, y);
  });
}

inline void rms_norm(const float* x, const float* weight, const float* bias, int width, float eps, float* out) {
  const float squares = fold(x, width, [](F32 total, F32 v) TOPG_INLINE_LAMBDA { return fma(v, v, total); });
  normalise(x, 0, 1 / __builtin_sqrtf(squares / float(width) + eps), weight, bias, width, out);
}

inline void layer_norm(const float* x, const float* weight, const float* bias, int width, float eps, float* out) {
  const float mean = fold(x, width, [](F32 total, F32 v) TOPG_INLINE_LAMBDA { return total + v; }) / float(width);
  const float squares = fold(x, width, [&](F32 total, F32 v) TOPG_INLINE_LAMBDA {
    const F32 centred = v - splat(mean);
    return fma(centred, centred, total);
  });
  normalise(x, mean, 1 / __builtin_sqrtf(squares / float(width) + eps), weight, bias, width, out);
}

// ---- activations --------------------------------------------------------------------------------------------------------

template <ActivationFunction kFunction>
TOPG_INLINE F32 activation(F32 x) {
  [[maybe_unused]] const F32 one = splat(1.0f), half = splat(0.5f);
  if constexpr (kFunction == ActivationFunction::kSilu) {
    return x / (one + exp(zero() - x));
  } else if constexpr (kFunction == ActivationFunction::kGelu) {
    return half * x * (one + erf(x * splat(0.70710678f)));  // sqrt(1 / 2)
  } else if constexpr (kFunction == ActivationFunction::kGeluTanh) {
    return half * x * (one + tanh(splat(0.79788456f) * fma(splat(0.044715f), x * x * x, x)));  // sqrt(2 / pi)
  } else {
    static_assert(kFunction == ActivationFunction::kRelu);
    return max(zero(), x);
  }
}

template <ActivationFunction kFunction>
void activate_with(const float* x, int width, float* out) {
  for_each_vector(width, [&](int i, auto lanes) TOPG_INLINE_LAMBDA {
    lanes.store(out + i, activation<kFunction>(lanes.load(x + i)));
  });
}

template <ActivationFunction kFunction>
void gate_with(const float* gate, const float* up, int width, float* out) {
  for_each_vector(width, [&](int i, auto lanes) TOPG_INLINE_LAMBDA {
    lanes.store(out + i, activation<kFunction>(lanes.load(gate + i)) * lanes.load(up + i));
  });
}

inline void activate(ActivationFunction function, const float* x, int width, float* out) {
  switch (function) {
    case ActivationFunction::kSilu: return activate_with<ActivationFunction::kSilu>(x, width, out);
    case ActivationFunction::kGelu: return activate_with<ActivationFunction::kGelu>(x, width, out);
    case ActivationFunction::kGeluTanh: return activate_with<ActivationFunction::kGeluTanh>(x, width, out);
    case ActivationFunction::kRelu: return activate_with<ActivationFunction::kRelu>(x, width, out);
  }
}

inline void gate(ActivationFunction function, const float* gate, const float* up, int width, float* out) {
  switch (function) {
    case ActivationFunction::kSilu: return gate_with<ActivationFunction::kSilu>(gate, up, width, out);
    case ActivationFunction::kGelu: return gate_with<ActivationFunction::kGelu>(gate, up, width, out);
    case ActivationFunction::kGeluTanh: return gate_with<ActivationFunction::kGeluTanh>(gate, up, width, out);
    case ActivationFunction::kRelu: return gate_with<ActivationFunction::kRelu>(gate, up, width, out);
  }
}

// ---- the rest -----------------------------------------------------------------------------------------------------------

inline void add(const float* left, const float* right, int width, float* out) {
  for_each_vector(width, [&](int i, auto lanes) TOPG_INLINE_LAMBDA {
    lanes.store(out + i, lanes.load(left + i) + lanes.load(right + i));
  });
}

inline void scale(const float* x, float factor, int width, float* out) {
  for_each_vector(width, [&](int i, auto lanes) TOPG_INLINE_LAMBDA {
    lanes.store(out + i, lanes.load(x + i) * splat(factor));
  });
}

inline void softcap(float* x, int width, float cap) {
  const float inverse = 1 / cap;
  for_each_vector(width, [&](int i, auto lanes) TOPG_INLINE_LAMBDA {
    lanes.store(x + i, splat(cap) * tanh(lanes.load(x + i) * splat(inverse)));
  });
}

inline void rotate_pairs(float* head, const float* cos, const float* sin, int half) {
  for_each_vector(half, [&](int i, auto lanes) TOPG_INLINE_LAMBDA {
    const F32 left = lanes.load(head + i), right = lanes.load(head + half + i);
    const F32 c = lanes.load(cos + i), s = lanes.load(sin + i);
    lanes.store(head + i, left * c - right * s);
    lanes.store(head + half + i, right * c + left * s);
  });
}

inline int argmax(const float* x, int count) {
  const F32 infinity = splat(__builtin_inff());
  const Mask all = first_lanes(kLanes);
  F32 best = zero() - infinity;
  Mask ordered = all;  // lanes that met neither NaN nor infinity
  int i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    const F32 v = load(x + i);
    best = max(best, v);
    ordered = ordered & less(v, infinity);
  }
  if (i < count) {
    const F32 v = select(first_lanes(count - i), load_first(x + i, count - i), zero() - infinity);
    best = max(best, v);
    ordered = ordered & less(v, infinity);
  }
  const float winner = largest(best);
  if (any(without(all, ordered)) || winner == -__builtin_inff()) return -1;
  for (i = 0; i + kLanes <= count; i += kLanes) {
    const Mask hits = equal(load(x + i), splat(winner));
    if (any(hits)) return i + first_lane(hits);
  }
  while (x[i] != winner) ++i;
  return i;
}

// ---- table --------------------------------------------------------------------------------------------------------------

inline RowKernels row_kernels() {
  RowKernels kernels;
  kernels.prepare = prepare;
  kernels.prepare_groups = prepare_groups;
  kernels.rms_norm = rms_norm;
  kernels.layer_norm = layer_norm;
  kernels.add = add;
  kernels.scale = scale;
  kernels.activate = activate;
  kernels.gate = gate;
  kernels.softcap = softcap;
  kernels.rotate_pairs = rotate_pairs;
  kernels.unpack_row = unpack_row;
  kernels.argmax = argmax;
  return kernels;
}

}  // namespace
}  // namespace topg
