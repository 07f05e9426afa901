#include "runtime/limits.h"

#include <algorithm>
#include <atomic>
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

// Operations per second of all threads, two for each multiply-add that `loop` does.
double measure_peak(ThreadPool& pool, double (*loop)(long)) {
  constexpr double kSeconds = 0.01;
  constexpr long kIterations = 500;
  double best = 0;
  for (int round = 0; round < kRounds; ++round) {
    std::atomic<long> calls{0};
    std::atomic<double> multiply_adds{0};  // of one call
    const double start = now();
    pool.run([&](int) {
      long mine = 0;
      for (; now() < start + kSeconds; ++mine) multiply_adds.store(loop(kIterations), std::memory_order_relaxed);
      calls.fetch_add(mine, std::memory_order_relaxed);
    });
    best = std::max(best, 2 * multiply_adds.load() * double(calls.load()) / (now() - start));
  }
  return best;
}

double measure_barrier(ThreadPool& pool) {
  constexpr int kBarriers = 500;
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
  limits.int8_ops_per_second = measure_peak(pool, kernels.peaks.int8);
  limits.bfloat16_ops_per_second = measure_peak(pool, kernels.peaks.bfloat16);
  limits.float32_ops_per_second = measure_peak(pool, kernels.peaks.float32);
  limits.barrier_seconds = measure_barrier(pool);
  return limits;
}

}  // namespace topg
