#include "runtime/limits.h"

#include <algorithm>
#include <chrono>
#include <cstring>

#include "runtime/isa.h"
#include "runtime/memory.h"

namespace topg {
namespace {

constexpr size_t kReadBytes = size_t(256) << 20;
constexpr int kRounds = 5;  // the best of them counts: a neighbour can only take away

double now() {
  using Clock = std::chrono::steady_clock;
  return std::chrono::duration<double>(Clock::now().time_since_epoch()).count();
}

// Operations per second of all threads in a loop of `iterations`, two for each multiply-add.
double measure_peak(ThreadPool& pool, double (*loop)(long), long iterations) {
  double best = 0;
  for (int round = 0; round < kRounds; ++round) {
    double multiply_adds = 0;
    const double start = now();
    pool.run([&](int thread) {
      const double done = loop(iterations);
      if (thread == 0) multiply_adds = done * pool.size();
    });
    best = std::max(best, 2 * multiply_adds / (now() - start));
  }
  return best;
}

double measure_barrier(ThreadPool& pool) {
  constexpr int kBarriers = 5000;
  double best = 1;
  for (int round = 0; round < kRounds; ++round) {
    const double start = now();
    pool.run([&](int thread) {
      for (int i = 0; i < kBarriers; ++i) pool.barrier(thread);
    });
    best = std::min(best, (now() - start) / kBarriers);
  }
  return best;
}

}  // namespace

double measure_read(const Kernels& kernels, ThreadPool& pool, const uint8_t* data, size_t bytes) {
  const double start = now();
  pool.run([&](int thread) {
    const size_t part = bytes / size_t(pool.size()) / 512 * 512;
    kernels.peaks.read(data + part * size_t(thread), part);
  });
  return double(bytes) / (now() - start);
}

Limits measure_limits(const Kernels& kernels, ThreadPool& pool) {
  pool.run([&](int) { enter_isa(kernels); });
  Limits limits{};
  {
    HugeBuffer buffer(kReadBytes);
    pool.run([&](int thread) {
      const Range mine = share(int(kReadBytes >> 20), thread, pool.size());
      std::memset(buffer.data() + (size_t(mine.begin) << 20), 1, size_t(mine.end - mine.begin) << 20);
    });
    for (int round = 0; round < kRounds; ++round) {
      limits.read_bytes_per_second =
          std::max(limits.read_bytes_per_second, measure_read(kernels, pool, buffer.data(), kReadBytes));
    }
  }
  constexpr long kIterations = 200'000;
  limits.int8_ops_per_second = measure_peak(pool, kernels.peaks.int8, kIterations);
  limits.bfloat16_ops_per_second = measure_peak(pool, kernels.peaks.bfloat16, kIterations);
  limits.float32_ops_per_second = measure_peak(pool, kernels.peaks.float32, kIterations);
  limits.barrier_seconds = measure_barrier(pool);
  return limits;
}

}  // namespace topg
