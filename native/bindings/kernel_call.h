// How bindings hand numpy arrays to kernels, for tests and benchmarks.
#pragma once

#include <nanobind/nanobind.h>

#include <exception>
#include <stdexcept>
#include <string>
#include <thread>

#include "kernels/kernels.h"
#include "runtime/isa.h"

namespace topg {

// Sizes are ints in kernels; no array of a test comes near this many elements.
constexpr size_t kLargestArray = size_t(1) << 30;

inline void require(bool condition, const std::string& message) {
  if (!condition) throw std::invalid_argument(message);
}

template <class Array>
const Array& checked_size(const Array& array, const char* name) {
  require(array.size() > 0 && array.size() <= kLargestArray,
          std::string(name) + " has " + std::to_string(array.size()) + " elements; allowed: 1 to 2^30");
  return array;
}

// Calls function(kernels) on a thread of its own: enter_isa changes how a thread computes, and the caller's must stay as it is.
// What the function throws, the caller throws.
template <class Function>
void call_kernels(const std::string& isa, Function function) {
  const Kernels& kernels = kernels_for(isa);
  nanobind::gil_scoped_release release;
  std::exception_ptr error;
  std::thread thread([&] {
    try {
      enter_isa(kernels);
      function(kernels);
    } catch (...) {
      error = std::current_exception();
    }
  });
  thread.join();
  if (error) std::rethrow_exception(error);
}

}  // namespace topg
