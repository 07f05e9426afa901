// Puts the kernels of one translation unit into a table.
#pragma once

#include "kernels/attention.h"
#include "kernels/blocks.h"
#include "kernels/grouped_linear.h"
#include "kernels/kernels.h"
#include "kernels/limits.h"
#include "kernels/plain_linear.h"
#include "kernels/rows.h"
#include "kernels/sampling.h"

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
