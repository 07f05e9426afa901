// Packing and the kernels of linears on numpy arrays, for tests and benchmarks.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <new>
#include <numeric>
#include <optional>
#include <tuple>
#include <vector>

#include "bindings/arrays.h"
#include "bindings/bindings.h"
#include "bindings/kernel_call.h"
#include "bindings/weight_format.h"
#include "kernels/gemm.h"
#include "kernels/pack.h"
#include "runtime/linear_bench.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace topg {
namespace {

// Memory of exactly the size that kernels are promised, so that tools which watch memory see a read beyond it.
struct FreeAligned {
  void operator()(uint8_t* p) const { operator delete[](p, std::align_val_t(kCacheLine)); }
};
using AlignedBytes = std::unique_ptr<uint8_t[], FreeAligned>;

AlignedBytes new_aligned(size_t bytes) {
  AlignedBytes memory(static_cast<uint8_t*>(operator new[](bytes, std::align_val_t(kCacheLine))));
  std::memset(memory.get(), 0, bytes);
  return memory;
}

using StoredParts = std::tuple<AnyArray, std::optional<AnyArray>, std::optional<AnyArray>>;

// ---- packed weights -----------------------------------------------------------------------------------------------------

size_t value_bytes(const WeightFormat& format, int rows, int columns) {
  const size_t count = size_t(rows) * padded_columns(format, columns);
  switch (format.code) {
    case WeightCode::kFloat32: return size_t(rows) * columns * 4;
    case WeightCode::kFloat16:
    case WeightCode::kBFloat16: return size_t(rows) * columns * 2;
    case WeightCode::kInt8: return count;
    case WeightCode::kInt4: return count / 2;
  }
  return 0;
}

const void* checked_part(const std::optional<AnyArray>& part, const char* name, size_t bytes) {
  const size_t given = part ? part->nbytes() : 0;
  require(given == bytes, std::string(name) + " of a source have " + std::to_string(given) + " bytes; they must have " +
                              std::to_string(bytes));
  return part ? part->data() : nullptr;
}

StoredWeight checked_source(const WeightFormat& format, const StoredParts& parts, int rows, int columns) {
  const size_t groups = format.grouped() ? padded_columns(format, columns) / format.group : 0;
  const size_t scales = size_t(rows) * groups * scale_bytes(format.scale);
  return {checked_part(std::get<0>(parts), "values", value_bytes(format, rows, columns)),
          checked_part(std::get<1>(parts), "scales", scales),
          checked_part(std::get<2>(parts), "minimums", format.minimum ? scales : 0), rows, columns};
}

class LinearWeight {
 public:
  LinearWeight(const std::string& code, const std::string& activation, const std::string& scale, int group, bool minimum,
               int rows, int columns, const std::vector<StoredParts>& sources) {
    weight_.format = checked_weight_format(code, activation, scale, group, minimum);
    require(rows > 0 && columns > 0 && size_t(rows) * size_t(columns) <= kLargestArray,
            "rows and columns must be positive, their product at most 2^30");
    require(sources.size() == 1 || sources.size() == 2, "a weight has 1 source, or 2 that are interleaved");
    std::vector<StoredWeight> stored;
    for (const StoredParts& parts : sources) stored.push_back(checked_source(weight_.format, parts, rows, columns));
    weight_.channels = packed_channels(rows, int(stored.size()));
    weight_.columns = columns;
    memory_ = new_aligned(bytes());
    pack_blocks(weight_.format, stored.data(), int(stored.size()), 0, weight_.blocks(), memory_.get());
    weight_.data = memory_.get();
  }

  const PackedWeight& weight() const { return weight_; }
  size_t bytes() const { return size_t(weight_.blocks()) * weight_.bytes_per_block(); }

 private:
  PackedWeight weight_;
  AlignedBytes memory_;
};

nb::object packed_bytes(const LinearWeight& weight) {
  auto out = new_vector<uint8_t>(weight.bytes());
  std::memcpy(out.data(), weight.weight().data, weight.bytes());
  return nb::cast(out);
}

// ---- products -----------------------------------------------------------------------------------------------------------

// Rows in the form a kernel multiplies, copied from arrays.
class CopiedRows {
 public:
  CopiedRows(const WeightFormat& format, size_t rows, int columns) {
    const size_t element = format.activation == ActivationCode::kFloat32    ? 4
                           : format.activation == ActivationCode::kBFloat16 ? 2
                                                                            : 1;
    const bool int8 = format.activation == ActivationCode::kInt8;
    activations_.format = {format.activation, int8 ? format.group : 0, int8 ? format.group : 0, false};
    activations_.columns = columns;
    activations_.stride = round_up(columns * int(element), kCacheLine) / ptrdiff_t(element);
    activations_.groups = int8 ? columns / format.group : 0;
    values_ = new_aligned(rows * activations_.stride * element);
    scales_ = new_aligned(rows * activations_.groups * sizeof(float));
    sums_ = new_aligned(rows * activations_.groups * sizeof(int32_t));
    activations_.values = values_.get();
    activations_.scales = reinterpret_cast<float*>(scales_.get());
    activations_.sums = reinterpret_cast<int32_t*>(sums_.get());
    row_bytes_ = size_t(columns) * element;
    stride_bytes_ = activations_.stride * element;
  }

  void copy_values(const void* values, size_t rows) {
    for (size_t row = 0; row < rows; row++) {
      std::memcpy(values_.get() + row * stride_bytes_, static_cast<const uint8_t*>(values) + row * row_bytes_, row_bytes_);
    }
  }

  void set_groups(const float* scales, size_t rows) {
    const int group = activations_.format.dot_group;
    std::copy_n(scales, rows * activations_.groups, activations_.scales);
    for (size_t i = 0; i < rows * activations_.groups; i++) {
      const int8_t* codes = activations_.row<int8_t>(int(i / activations_.groups)) + i % activations_.groups * group;
      activations_.sums[i] = std::accumulate(codes, codes + group, 0);
    }
  }

  const Activations& activations() const { return activations_; }

 private:
  Activations activations_;
  AlignedBytes values_, scales_, sums_;
  size_t row_bytes_, stride_bytes_;
};

void check_values(const WeightFormat& format, const AnyArray& values, int columns) {
  const nb::dlpack::dtype wanted = format.activation == ActivationCode::kInt8       ? nb::dtype<int8_t>()
                                   : format.activation == ActivationCode::kBFloat16 ? nb::dtype<uint16_t>()
                                                                                    : nb::dtype<float>();
  require(values.dtype() == wanted, "values must be int8, uint16 (bits of bfloat16) or float32, as the weight's activations");
  require(values.ndim() == 2 && values.shape(1) == size_t(columns),
          "values must be [rows, " + std::to_string(columns) + "]: the weight's columns, filled up to whole groups");
  checked_size(values, "values");
}

nb::ndarray<nb::numpy, float> linear(const std::string& isa, const LinearWeight& packed, const AnyArray& values,
                                     const std::optional<Matrix<float>>& scales, int max_rows) {
  const PackedWeight& weight = packed.weight();
  const WeightFormat& format = weight.format;
  LinearKernel kernel = kernels_for(isa).linear(format);
  require(kernel.name != nullptr, "this weight format has no kernel with these activations");
  require(max_rows >= 0 && max_rows <= kernel.max_rows, "max_rows is " + std::to_string(max_rows) + "; allowed: 1 to " +
                                                            std::to_string(kernel.max_rows) + ", or 0 for that");
  if (max_rows != 0) kernel.max_rows = max_rows;
  const int columns = padded_columns(format, weight.columns);
  check_values(format, values, columns);
  const size_t rows = values.shape(0);
  CopiedRows x(format, rows, columns);
  x.copy_values(values.data(), rows);
  const size_t groups = x.activations().groups;
  require(scales.has_value() == (groups != 0), "int8 activations have scales, others have none");
  if (scales) {
    require(scales->shape(0) == rows && scales->shape(1) == groups, "scales must be [rows, groups]");
    x.set_groups(scales->data(), rows);
  }
  auto out = new_matrix<float>(rows, size_t(weight.channels));
  const AlignedBytes slab = new_aligned(slab_floats(kernel) * sizeof(float));
  call_kernels(isa, [&](const Kernels&) {
    multiply(kernel, weight, x.activations(), 0, int(rows), 0, weight.blocks(), reinterpret_cast<float*>(slab.get()),
             [&](int row, int tile_rows, int block, const float* c) {
               const int first = block * kBlockChannels, count = std::min(kBlockChannels, weight.channels - first);
               for (int r = 0; r < tile_rows; r++) {
                 std::copy_n(c + r * kBlockChannels, count, out.data() + size_t(row + r) * weight.channels + first);
               }
             });
  });
  return out;
}

std::tuple<std::string, int> linear_kernel(const std::string& isa, const std::string& code, const std::string& activation,
                                           const std::string& scale, int group, bool minimum) {
  const LinearKernel kernel = kernels_for(isa).linear(checked_weight_format(code, activation, scale, group, minimum));
  return {kernel.name != nullptr ? kernel.name : "", kernel.max_rows};
}

nb::dict bench_linear(const std::string& isa, int threads, const std::string& code, const std::string& activation,
                      const std::string& scale, int group, bool minimum, int channels, int columns, int rows,
                      bool streaming, double seconds) {
  const Kernels& kernels = kernels_for(isa);
  const WeightFormat format = checked_weight_format(code, activation, scale, group, minimum);
  require(kernels.linear(format).name != nullptr, "this weight format has no kernel with these activations");
  require(threads >= 1 && threads <= 1024, "threads must be 1 to 1024");
  require(channels > 0 && columns > 0 && rows > 0 && size_t(channels) * size_t(columns) <= kLargestArray / 4 &&
              size_t(rows) * size_t(columns) <= kLargestArray / 4,
          "channels, columns and rows must be positive, products with columns at most 2^28");
  require(seconds > 0 && seconds <= 60, "seconds must be above 0, at most 60");
  LinearRates rates;
  {
    nb::gil_scoped_release release;
    ThreadPool pool(threads);
    rates = streaming ? bench_streaming_linear(kernels, pool, format, channels, columns, rows, seconds)
                      : bench_hot_linear(kernels, pool, format, channels, columns, rows, seconds);
  }
  nb::dict result;
  result["rate"] = rates.rate;
  result["limit"] = rates.limit;
  result["share"] = rates.share;
  return result;
}

}  // namespace

void bind_linear(nb::module_& module) {
  nb::class_<LinearWeight>(module, "LinearWeight", "A weight packed from stored arrays, of one source or two interleaved.")
      .def(nb::init<const std::string&, const std::string&, const std::string&, int, bool, int, int,
                    const std::vector<StoredParts>&>(),
           "code"_a, "activation"_a, "scale"_a, "group"_a, "minimum"_a, "rows"_a, "columns"_a, "sources"_a)
      .def_prop_ro("channels", [](const LinearWeight& weight) { return weight.weight().channels; })
      .def("packed", packed_bytes);
  module.def("linear", linear, "isa"_a, "weight"_a, "values"_a, "scales"_a.none() = nb::none(), "max_rows"_a = 0,
             "Prepared activations times a weight, in tiles of at most `max_rows` rows.");
  module.def("linear_kernel", linear_kernel, "isa"_a, "code"_a, "activation"_a, "scale"_a, "group"_a, "minimum"_a,
             "Name and largest tile of a format's kernel; the name is \"\" when it has none.");
  module.def("bench_linear", bench_linear, "isa"_a, "threads"_a, "code"_a, "activation"_a, "scale"_a, "group"_a, "minimum"_a,
             "channels"_a, "columns"_a, "rows"_a, "streaming"_a, "seconds"_a,
             "Medians of a kernel's rate, of the machine's limit measured beside it, and of their ratio.");
}

}  // namespace topg
