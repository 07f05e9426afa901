// Puts the kernels of one translation unit into a table.
#pragma once

#include "kernels/blocks.h"
#include "kernels/kernels.h"

#if __has_include("kernels/attention.h")
#include "kernels/attention.h"
#else
namespace topg { namespace {
inline AttentionKernel attention_kernel(KVType) { return {}; }
} }
#endif
#if __has_include("kernels/grouped_linear.h")
#include "kernels/grouped_linear.h"
#else
namespace topg { namespace {
inline LinearKernel grouped_linear(const WeightFormat&) { return {}; }
} }
#endif
#include "kernels/kernels.h"
#include "kernels/limits.h"
#if __has_include("kernels/plain_linear.h")
#include "kernels/plain_linear.h"
#else
namespace topg { namespace {
inline LinearKernel plain_linear(const WeightFormat&) { return {}; }
} }
#endif
#include "kernels/rows.h"
#if __has_include("kernels/sampling.h")
#include "kernels/sampling.h"
#else
namespace topg { namespace {
inline SamplingKernels sampling_kernels() { return {}; }
} }
#endif

namespace topg {
namespace {

inline LinearKernel linear_kernel(const WeightFormat& format) {
  return format.grouped() ? grouped_linear(format) : plain_linear(format);
}

inline Kernels make_kernels(const char* isa) {
  Kernels kernels;
  kernels.isa = isa;
  kernels.rows = row_kernels();
  kernels.blocks = block_kernels();
  kernels.sampling = sampling_kernels();
  kernels.peaks = peak_kernels();
  kernels.linear = linear_kernel;
  kernels.attention = attention_kernel;
  return kernels;
}

}  // namespace
}  // namespace topg
