// Instruction sets, limits of the machine, and a self-test of the thread pool.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <atomic>

#include "bindings/bindings.h"
#include "bindings/kernel_call.h"
#include "runtime/isa.h"
#include "runtime/limits.h"
#include "runtime/thread_pool.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace topg {
namespace {

nb::dict limits_of(const std::string& isa, int threads) {
  Limits limits{};
  call_kernels(isa, [&](const Kernels& kernels) {
    ThreadPool pool(threads);
    limits = measure_limits(kernels, pool);
  });
  nb::dict result;
  result["read_bytes_per_second"] = limits.read_bytes_per_second;
  result["int8_ops_per_second"] = limits.int8_ops_per_second;
  result["bfloat16_ops_per_second"] = limits.bfloat16_ops_per_second;
  result["float32_ops_per_second"] = limits.float32_ops_per_second;
  result["barrier_seconds"] = limits.barrier_seconds;
  return result;
}

// Every thread adds one before each barrier and must see everybody's after it; returns how often one did not.
long count_barrier_faults(ThreadPool& pool, int runs, int barriers) {
  nb::gil_scoped_release release;
  std::atomic<long> arrivals{0}, faults{0};
  for (int run = 0; run < runs; ++run) {
    arrivals = 0;
    pool.run([&](int thread) {
      for (int i = 1; i <= barriers; ++i) {
        arrivals.fetch_add(1, std::memory_order_relaxed);
        pool.barrier(thread);
        if (arrivals.load(std::memory_order_relaxed) != long(i) * pool.size()) faults.fetch_add(1);
        pool.barrier(thread);
      }
    });
  }
  return faults.load();
}

}  // namespace

void bind_runtime(nb::module_& module) {
  module.def("built_isas", built_isas, "Instruction sets this build has kernels for, slowest first.");
  module.def("usable_isas", usable_isas, "Those that this processor and operating system can run.");
  module.def("isa_for", [](const std::string& name) { return std::string(kernels_for(name).isa); }, "name"_a,
             "The instruction set that is used when `name` is asked for; \"\" asks for the best.  Raises ValueError.");
  module.def("measure_limits", limits_of, "isa"_a, "threads"_a,
             "Bandwidth [bytes/s], peaks [operations/s, two a multiply-add] and barrier time [s], in half a second.");
  nb::class_<ThreadPool>(module, "ThreadPool", "The engine's threads, for tests.")
      .def(nb::init<int>(), "threads"_a)
      .def("count_barrier_faults", count_barrier_faults, "runs"_a, "barriers"_a,
           "Barriers that let a thread through too early: 0 unless the pool is broken.");
}

}  // namespace topg
