// Arrays that come from Python, checked.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <stdexcept>
#include <string>

namespace topg {

template <class T>
using Vector = nanobind::ndarray<const T, nanobind::ndim<1>, nanobind::c_contig, nanobind::device::cpu>;
template <class T>
using Matrix = nanobind::ndarray<const T, nanobind::ndim<2>, nanobind::c_contig, nanobind::device::cpu>;

// An array of any type, C-contiguous.
using AnyArray = nanobind::ndarray<nanobind::ro, nanobind::c_contig, nanobind::device::cpu>;

// A new numpy array [rows, columns], not initialised.  Throws std::bad_alloc.
template <class T>
nanobind::ndarray<nanobind::numpy, T> new_matrix(size_t rows, size_t columns) {
  T* data = new T[rows * columns];
  nanobind::capsule owner(data, [](void* p) noexcept { delete[] static_cast<T*>(p); });
  return nanobind::ndarray<nanobind::numpy, T>(data, {rows, columns}, owner);
}

template <class T>
nanobind::ndarray<nanobind::numpy, T> new_vector(size_t count) {
  T* data = new T[count];
  nanobind::capsule owner(data, [](void* p) noexcept { delete[] static_cast<T*>(p); });
  return nanobind::ndarray<nanobind::numpy, T>(data, {count}, owner);
}

inline int checked_int(size_t value, const char* what) {
  if (value > size_t(INT32_MAX)) throw std::invalid_argument(std::string(what) + " is too large: " + std::to_string(value));
  return int(value);
}

}  // namespace topg
