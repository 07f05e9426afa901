// What this machine can do at most, measured: the yardstick of `topg bench` and `topg doctor`.
#pragma once

#include "kernels/kernels.h"
#include "runtime/thread_pool.h"

namespace topg {

struct Limits {
  double read_bytes_per_second;    // all threads, a buffer larger than any cache
  double int8_ops_per_second;      // multiplications and additions, all threads
  double bfloat16_ops_per_second;
  double float32_ops_per_second;
  double barrier_seconds;          // one barrier of all threads
};

// Takes about half a second, and 256 MB of memory while it runs.
Limits measure_limits(const Kernels& kernels, ThreadPool& pool);

// The read bandwidth alone, over `bytes` of `data`: for use beside another measurement.  Bytes per second.
double measure_read(const Kernels& kernels, ThreadPool& pool, const uint8_t* data, size_t bytes);

}  // namespace topg
