#include "runtime/linear_bench.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <vector>

#include "kernels/gemm.h"
#include "runtime/isa.h"
#include "runtime/limits.h"
#include "runtime/memory.h"

namespace topg {
namespace {

constexpr size_t kStreamBytes = size_t(256) << 20;
constexpr double kSliceSeconds = 0.004;  // of one measurement: short, so that both of a round meet the same machine
constexpr int kFill = 0x3c;              // a code, and in every scale type a normal number, when all bytes are this

double now() {
  using Clock = std::chrono::steady_clock;
  return std::chrono::duration<double>(Clock::now().time_since_epoch()).count();
}

double median(std::vector<double> values) {
  std::nth_element(values.begin(), values.begin() + values.size() / 2, values.end());
  return values[values.size() / 2];
}

// Copies of a weight, and rows to multiply them with; contents do not matter for the speed.
class LinearRun {
 public:
  LinearRun(const Kernels& kernels, ThreadPool& pool, const WeightFormat& format, int channels, int columns, int rows,
            size_t least_bytes)
      : kernel_(kernels.linear(format)), pool_(pool), rows_(rows) {
    weight_.format = format;
    weight_.channels = channels;
    weight_.columns = columns;
    copies_ = std::max<int>(1, int(least_bytes / weight_bytes()));
    weights_ = HugeBuffer(weight_bytes() * copies_);
    std::memset(weights_.data(), kFill, weights_.size());
    set_activations(format, padded_columns(format, columns));
    slabs_ = HugeBuffer(slab_bytes() * pool.size());
    pool.run([&](int) { enter_isa(kernels); });
  }

  // Multiplies `passes` times with every copy; each thread has its part of the channels.  Seconds.
  double run(int passes) {
    const double start = now();
    pool_.run([&](int thread) {
      const Range blocks = share(weight_.blocks(), thread, pool_.size());
      float* slab = reinterpret_cast<float*>(slabs_.data() + slab_bytes() * thread);
      for (int i = 0; i < passes * copies_; i++) {
        PackedWeight weight = weight_;
        weight.data = weights_.data() + weight_bytes() * (i % copies_);
        multiply(kernel_, weight, x_, 0, rows_, blocks.begin, blocks.end, slab, [](int, int, int, const float*) {});
      }
    });
    return now() - start;
  }

  size_t weight_bytes() const { return weight_.blocks() * weight_.bytes_per_block(); }
  const HugeBuffer& weights() const { return weights_; }

 private:
  size_t slab_bytes() const { return round_up(int(slab_floats(kernel_) * sizeof(float)), 4096); }

  void set_activations(const WeightFormat& format, int columns) {
    const bool int8 = format.activation == ActivationCode::kInt8;
    x_.format = {format.activation, int8 ? format.group : 0, int8 ? format.group : 0, false};
    x_.columns = columns;
    x_.stride = round_up(columns, kCacheLine);
    x_.groups = int8 ? columns / format.group : 0;
    const size_t groups = size_t(rows_) * columns / kLanes;  // at most
    values_ = HugeBuffer(size_t(rows_) * x_.stride * sizeof(float));
    scales_ = HugeBuffer(groups * sizeof(float));
    sums_ = HugeBuffer(groups * sizeof(int32_t));
    for (const HugeBuffer* buffer : {&values_, &scales_}) std::memset(buffer->data(), kFill, buffer->size());
    x_.values = values_.data();
    x_.scales = reinterpret_cast<float*>(scales_.data());
    x_.sums = reinterpret_cast<int32_t*>(sums_.data());
  }

  LinearKernel kernel_;
  ThreadPool& pool_;
  int rows_, copies_;
  PackedWeight weight_;
  Activations x_;
  HugeBuffer weights_, values_, scales_, sums_, slabs_;
};

// Rounds of limit() and rate() until the time is over, the first of them to warm up.
template <class Limit, class Rate>
LinearRates measure_rounds(double seconds, Limit limit, Rate rate) {
  std::vector<double> limits, rates, shares;
  limit();
  rate();
  for (const double end = now() + seconds; limits.empty() || now() < end;) {
    limits.push_back(limit());
    rates.push_back(rate());
    shares.push_back(rates.back() / limits.back());
  }
  return {median(rates), median(limits), median(shares)};
}

// The fastest multiplication of the numbers that a format's kernel multiplies.
double (*peak_of(const Kernels& kernels, const WeightFormat& format))(long) {
  if (format.activation == ActivationCode::kInt8) return kernels.peaks.int8;
  return format.code == WeightCode::kBFloat16 ? kernels.peaks.bfloat16 : kernels.peaks.float32;
}

}  // namespace

LinearRates bench_hot_linear(const Kernels& kernels, ThreadPool& pool, const WeightFormat& format, int channels, int columns,
                             int rows, double seconds) {
  LinearRun linear(kernels, pool, format, channels, columns, rows, 0);
  linear.run(1);
  const int passes = std::max(1, int(kSliceSeconds / linear.run(1)));
  double (*const loop)(long) = peak_of(kernels, format);
  double start = now();
  loop(10'000);
  const long iterations = std::max(1L, long(10'000 * kSliceSeconds / (now() - start)));
  const auto peak = [&] {
    std::vector<double> done(pool.size());
    start = now();
    pool.run([&](int thread) { done[thread] = loop(iterations); });
    return 2 * done[0] * pool.size() / (now() - start);
  };
  const double operations = 2.0 * rows * channels * columns * passes;
  return measure_rounds(seconds, peak, [&] { return operations / linear.run(passes); });
}

LinearRates bench_streaming_linear(const Kernels& kernels, ThreadPool& pool, const WeightFormat& format, int channels,
                                   int columns, int rows, double seconds) {
  LinearRun linear(kernels, pool, format, channels, columns, rows, kStreamBytes);
  const HugeBuffer& weights = linear.weights();
  const auto read = [&] { return measure_read(kernels, pool, weights.data(), weights.size()); };
  return measure_rounds(seconds, read, [&] { return double(weights.size()) / linear.run(1); });
}

}  // namespace topg
