// The kernels of one row (RowKernels) and the plain linears, called on numpy arrays.  Every function takes the name of an
// instruction set first and raises ValueError for what its kernel must not be given.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>

#include <algorithm>
#include <optional>

#include "bindings/arrays.h"
#include "bindings/bindings.h"
#include "bindings/kernel_call.h"
#include "bindings/names.h"
#include "runtime/memory.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace topg {
namespace {

using FloatVector = Vector<float>;
using FloatMatrix = Matrix<float>;
template <class T>
using OutputArray = nb::ndarray<nb::numpy, T>;

// ---- one row to another -------------------------------------------------------------------------------------------------

const float* row_of(const FloatMatrix& x, size_t row) { return x.data() + row * x.shape(1); }

void require_length(const char* name, size_t given, size_t needed) {
  require(given == needed,
          std::string(name) + " has " + std::to_string(given) + " elements; it must have " + std::to_string(needed));
}

void require_same_shape(const FloatMatrix& left, const FloatMatrix& right) {
  require(left.shape(0) == right.shape(0) && left.shape(1) == right.shape(1), "both arrays must have the same shape");
}

// out[row] = function(kernels, row of x, width, row of out) for every row.
template <class Function>
OutputArray<float> map_rows(const std::string& isa, const FloatMatrix& x, Function function) {
  checked_size(x, "x");
  OutputArray<float> out = new_matrix<float>(x.shape(0), x.shape(1));
  const int width = int(x.shape(1));
  call_kernels(isa, [&](const Kernels& kernels) {
    for (size_t row = 0; row < x.shape(0); ++row) function(kernels.rows, row, width, out.data() + row * x.shape(1));
  });
  return out;
}

using NormFunction = void (*RowKernels::*)(const float*, const float*, const float*, int, float, float*);

template <NormFunction kNorm>
OutputArray<float> norm(const std::string& isa, const FloatMatrix& x, const std::optional<FloatVector>& weight,
                        const std::optional<FloatVector>& bias, float eps) {
  if (weight) require_length("weight", weight->size(), x.shape(1));
  if (bias) require_length("bias", bias->size(), x.shape(1));
  return map_rows(isa, x, [&](const RowKernels& rows, size_t row, int width, float* out) {
    (rows.*kNorm)(row_of(x, row), weight ? weight->data() : nullptr, bias ? bias->data() : nullptr, width, eps, out);
  });
}

OutputArray<float> add(const std::string& isa, const FloatMatrix& left, const FloatMatrix& right) {
  require_same_shape(left, right);
  return map_rows(isa, left, [&](const RowKernels& rows, size_t row, int width, float* out) {
    rows.add(row_of(left, row), row_of(right, row), width, out);
  });
}

OutputArray<float> scale(const std::string& isa, const FloatMatrix& x, float factor) {
  return map_rows(isa, x, [&](const RowKernels& rows, size_t row, int width, float* out) {
    rows.scale(row_of(x, row), factor, width, out);
  });
}

OutputArray<float> activate(const std::string& isa, const std::string& name, const FloatMatrix& x) {
  const ActivationFunction function = activation_function(name);
  return map_rows(isa, x, [&](const RowKernels& rows, size_t row, int width, float* out) {
    rows.activate(function, row_of(x, row), width, out);
  });
}

OutputArray<float> gate(const std::string& isa, const std::string& name, const FloatMatrix& gate, const FloatMatrix& up) {
  const ActivationFunction function = activation_function(name);
  require_same_shape(gate, up);
  return map_rows(isa, gate, [&](const RowKernels& rows, size_t row, int width, float* out) {
    rows.gate(function, row_of(gate, row), row_of(up, row), width, out);
  });
}

OutputArray<float> softcap(const std::string& isa, const FloatMatrix& x, float cap) {
  require(cap > 0, "cap is " + std::to_string(cap) + "; it must be positive");
  return map_rows(isa, x, [&](const RowKernels& rows, size_t row, int width, float* out) {
    std::copy_n(row_of(x, row), width, out);
    rows.softcap(out, width, cap);
  });
}

OutputArray<float> rotate_pairs(const std::string& isa, const FloatMatrix& heads, const FloatVector& cos, const FloatVector& sin) {
  require_length("sin", sin.size(), cos.size());
  require(cos.size() <= heads.shape(1) / 2, "cos has more elements than half a head");
  return map_rows(isa, heads, [&](const RowKernels& rows, size_t row, int width, float* out) {
    std::copy_n(row_of(heads, row), width, out);
    rows.rotate_pairs(out, cos.data(), sin.data(), int(cos.size()));
  });
}

int argmax(const std::string& isa, const FloatVector& x) {
  checked_size(x, "x");
  int index = -1;
  call_kernels(isa, [&](const Kernels& kernels) { index = kernels.rows.argmax(x.data(), int(x.size())); });
  return index;
}

// ---- prepared activations -----------------------------------------------------------------------------------------------

constexpr int kLargestGroup = 256;

ActivationFormat activation_format(const std::string& code, int group, int dot_group, bool rotated) {
  ActivationFormat format{activation_code(code), group, dot_group, rotated};
  if (format.code != ActivationCode::kInt8) {
    require(group == 0 && dot_group == 0, "only int8 activations have groups");
    return format;
  }
  const bool powers = group > 0 && dot_group > 0 && (group & (group - 1)) == 0 && (dot_group & (dot_group - 1)) == 0;
  require(powers && kLanes <= dot_group && dot_group <= group && group <= kLargestGroup,
          "groups of " + std::to_string(group) + " columns in dot groups of " + std::to_string(dot_group) +
              "; allowed: powers of two, 16 <= dot_group <= group <= 256");
  return format;
}

// Rows of a linear's input and the memory they lie in.
class PreparedRows {
 public:
  PreparedRows(const ActivationFormat& format, size_t rows, int columns) {
    const size_t element = format.code == ActivationCode::kFloat32 ? 4 : format.code == ActivationCode::kBFloat16 ? 2 : 1;
    activations_.format = format;
    activations_.columns = columns;
    activations_.groups = format.dot_group != 0 ? columns / format.dot_group : 0;
    activations_.stride = round_up(columns * int(element), 64) / ptrdiff_t(element);
    const size_t groups = rows * size_t(activations_.groups);
    values_ = HugeBuffer(rows * size_t(activations_.stride) * element);
    scales_ = HugeBuffer(std::max<size_t>(groups, 1) * sizeof(float));
    sums_ = HugeBuffer(std::max<size_t>(groups, 1) * sizeof(int32_t));
    activations_.values = values_.data();
    activations_.scales = reinterpret_cast<float*>(scales_.data());
    activations_.sums = reinterpret_cast<int32_t*>(sums_.data());
  }

  const Activations& activations() const { return activations_; }

 private:
  HugeBuffer values_, scales_, sums_;
  Activations activations_;
};

// Prepares a row at once, or `piece` dot groups at a time.
void prepare_row(const RowKernels& rows, const float* x, int columns, const Activations& out, int row, int piece) {
  if (piece == 0) return rows.prepare(x, columns, out, row);
  const int unit = out.format.dot_group != 0 ? out.format.dot_group : kRotationGroup;
  const int groups = (out.columns + unit - 1) / unit;
  for (int first = 0; first < groups; first += piece) {
    const int start = std::min(first * unit, columns);
    rows.prepare_groups(x + start, columns - start, out, row, first, std::min(first + piece, groups));
  }
}

template <class T>
nb::object copied(const Activations& activations, size_t rows) {
  OutputArray<T> out = new_matrix<T>(rows, size_t(activations.columns));
  for (size_t row = 0; row < rows; ++row) {
    std::copy_n(activations.row<T>(int(row)), activations.columns, out.data() + row * size_t(activations.columns));
  }
  return nb::cast(out);
}

// (values, scales, sums); the last two are empty unless the code is int8.
nb::tuple prepare(const std::string& isa, const FloatMatrix& x, const std::string& code, int group, int dot_group, bool rotated,
                  int columns, int piece) {
  checked_size(x, "x");
  const ActivationFormat format = activation_format(code, group, dot_group, rotated);
  const int unit = std::max({rotated && dot_group == 0 ? kRotationGroup : 1, dot_group});
  const int span = std::max(group, rotated ? kRotationGroup : 0) / std::max(dot_group, 1);
  require(columns >= int(x.shape(1)) && columns % unit == 0 && size_t(columns) * x.shape(0) <= kLargestArray,
          std::to_string(columns) + " columns; allowed: at least those of x, a multiple of " + std::to_string(unit));
  require(piece >= 0 && (dot_group == 0 || piece % span == 0), "a piece must be whole groups and whole runs of the rotation");
  const PreparedRows prepared(format, x.shape(0), columns);
  const Activations& activations = prepared.activations();
  call_kernels(isa, [&](const Kernels& kernels) {
    for (size_t row = 0; row < x.shape(0); ++row) {
      prepare_row(kernels.rows, row_of(x, row), int(x.shape(1)), activations, int(row), piece);
    }
  });
  const size_t rows = x.shape(0), groups = size_t(activations.groups);
  OutputArray<float> scales = new_matrix<float>(rows, groups);
  OutputArray<int32_t> sums = new_matrix<int32_t>(rows, groups);
  std::copy_n(activations.scales, rows * groups, scales.data());
  std::copy_n(activations.sums, rows * groups, sums.data());
  const nb::object values = format.code == ActivationCode::kFloat32    ? copied<float>(activations, rows)
                            : format.code == ActivationCode::kBFloat16 ? copied<uint16_t>(activations, rows)
                                                                       : copied<int8_t>(activations, rows);
  return nb::make_tuple(values, scales, sums);
}

// ---- packed weights -----------------------------------------------------------------------------------------------------

// A packed weight copied from bytes as layout.h describes them.
class PackedBytes {
 public:
  PackedBytes(const Vector<uint8_t>& bytes, const std::string& code, const std::string& activation,
              const std::string& scale, int group, bool minimum, int channels, int columns, bool rotated) {
    WeightFormat& format = weight_.format;
    format = {weight_code(code), activation_code(activation),
              scale_type(scale), group, minimum};
    const bool codes = format.code == WeightCode::kInt8 || format.code == WeightCode::kInt4;
    require(codes == (format.scale != ScaleType::kNone) && codes == (group != 0) && (codes || !minimum),
            "int8 and int4 weights have groups and scales, the other types do not");
    require(group == 0 || (group >= kLanes && group <= kLargestGroup && (group & (group - 1)) == 0),
            "group is " + std::to_string(group) + "; allowed: powers of two from 16 to 256");
    require(format.code != WeightCode::kInt4 || format.activation == ActivationCode::kInt8, "int4 needs int8 activations");
    require(channels > 0 && columns > 0 && size_t(channels) * size_t(columns) <= kLargestArray,
            "channels and columns must be positive, their product at most 2^30");
    weight_.channels = channels;
    weight_.columns = columns;
    weight_.rotated = rotated;
    require_length("packed", bytes.size(), size_t(weight_.blocks()) * weight_.bytes_per_block());
    memory_ = HugeBuffer(bytes.size());
    std::copy_n(bytes.data(), bytes.size(), memory_.data());
    weight_.data = memory_.data();
  }

  const PackedWeight& weight() const { return weight_; }

 private:
  HugeBuffer memory_;
  PackedWeight weight_;
};

OutputArray<float> unpack(const std::string& isa, const PackedBytes& packed) {
  const PackedWeight& weight = packed.weight();
  OutputArray<float> out = new_matrix<float>(size_t(weight.channels), size_t(weight.columns));
  call_kernels(isa, [&](const Kernels& kernels) {
    for (int channel = 0; channel < weight.channels; ++channel) {
      kernels.rows.unpack_row(weight, channel, out.data() + size_t(channel) * size_t(weight.columns));
    }
  });
  return out;
}

// x @ weight.T in tiles of at most `tile_rows` rows, with a plain format's kernel.
OutputArray<float> multiply_plain(const std::string& isa, const PackedBytes& packed, const FloatMatrix& x, int tile_rows) {
  checked_size(x, "x");
  const PackedWeight& weight = packed.weight();
  require(!weight.format.grouped(), "the weight has groups; this function multiplies plain formats");
  require_length("a row of x", x.shape(1), size_t(weight.columns));
  const LinearKernel kernel = kernels_for(isa).linear(weight.format);
  require(kernel.name != nullptr, "this weight format has no kernel with these activations");
  require(tile_rows >= 1 && tile_rows <= kernel.max_rows,
          "tile_rows is " + std::to_string(tile_rows) + "; allowed: 1 to " + std::to_string(kernel.max_rows));
  const int rows = int(x.shape(0)), columns = padded_columns(weight.format, weight.columns);
  const PreparedRows prepared({weight.format.activation, 0, 0, false}, x.shape(0), columns);
  HugeBuffer slab(size_t(tile_rows) * kBlockChannels * sizeof(float));
  float* sums = reinterpret_cast<float*>(slab.data());
  OutputArray<float> out = new_matrix<float>(x.shape(0), size_t(weight.channels));
  call_kernels(isa, [&](const Kernels& kernels) {
    for (int row = 0; row < rows; ++row) {
      kernels.rows.prepare(row_of(x, size_t(row)), weight.columns, prepared.activations(), row);
    }
    for (int block = 0; block < weight.blocks(); ++block) {
      const int first = block * kBlockChannels, channels = std::min(kBlockChannels, weight.channels - first);
      for (int row = 0; row < rows; row += tile_rows) {
        const int count = std::min(tile_rows, rows - row);
        kernel.tile(weight.format, {&prepared.activations(), row, count, weight.block(block), sums, weight.data, 1});
        for (int r = 0; r < count; ++r) {
          std::copy_n(sums + r * kBlockChannels, channels, out.data() + size_t(row + r) * out.shape(1) + first);
        }
      }
    }
  });
  return out;
}

int plain_tile_rows(const std::string& isa, const PackedBytes& packed) {
  return kernels_for(isa).linear(packed.weight().format).max_rows;
}

}  // namespace

void bind_rows(nb::module_& module) {
  module.def("row_rms_norm", norm<&RowKernels::rms_norm>, "isa"_a, "x"_a, "weight"_a.none(), "bias"_a.none(), "eps"_a);
  module.def("row_layer_norm", norm<&RowKernels::layer_norm>, "isa"_a, "x"_a, "weight"_a.none(), "bias"_a.none(), "eps"_a);
  module.def("row_add", add, "isa"_a, "left"_a, "right"_a);
  module.def("row_scale", scale, "isa"_a, "x"_a, "factor"_a);
  module.def("row_activate", activate, "isa"_a, "function"_a, "x"_a);
  module.def("row_gate", gate, "isa"_a, "function"_a, "gate"_a, "up"_a);
  module.def("row_softcap", softcap, "isa"_a, "x"_a, "cap"_a);
  module.def("row_rotate_pairs", rotate_pairs, "isa"_a, "heads"_a, "cos"_a, "sin"_a);
  module.def("row_argmax", argmax, "isa"_a, "x"_a);
  module.def("row_prepare", prepare, "isa"_a, "x"_a, "code"_a, "group"_a, "dot_group"_a, "rotated"_a, "columns"_a,
             "piece"_a = 0, "(values, scales, sums) of rows in the form a linear multiplies, `piece` dot groups at a time.");
  nb::class_<PackedBytes>(module, "PackedBytes", "A weight in packed form, from its bytes.")
      .def(nb::init<const Vector<uint8_t>&, const std::string&, const std::string&, const std::string&, int, bool, int,
                    int, bool>(),
           "packed"_a, "code"_a, "activation"_a, "scale"_a, "group"_a, "minimum"_a, "channels"_a, "columns"_a, "rotated"_a);
  module.def("row_unpack", unpack, "isa"_a, "weight"_a, "All channels of a packed weight, each unpacked on its own.");
  module.def("plain_linear", multiply_plain, "isa"_a, "weight"_a, "x"_a, "tile_rows"_a);
  module.def("plain_tile_rows", plain_tile_rows, "isa"_a, "weight"_a, "Most rows a tile of plain_linear can have.");
}

}  // namespace topg
