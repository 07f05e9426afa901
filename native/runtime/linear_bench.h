// How fast a linear is beside what the machine can do at most in the same moment.
#pragma once

#include "kernels/kernels.h"
#include "runtime/thread_pool.h"

namespace topg {

// Medians over rounds; in each round the kernel and the limit were measured one right after the other.
struct LinearRates {
  double rate;
  double limit;
  double share;  // median of the rounds' rate / limit
};

// One weight again and again, from the caches: operations per second (two a multiply-add) against the multipliers' peak.
LinearRates bench_hot_linear(const Kernels& kernels, ThreadPool& pool, const WeightFormat& format, int channels, int columns,
                             int rows, double seconds);

// So many copies of the weight that they come from memory: bytes of weights per second against the read bandwidth.
LinearRates bench_streaming_linear(const Kernels& kernels, ThreadPool& pool, const WeightFormat& format, int channels,
                                   int columns, int rows, double seconds);

}  // namespace topg
