// topg._native.Engine, and the pieces programs are made of.
#include "engine/engine.h"

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "bindings/arrays.h"
#include "bindings/bindings.h"
#include "bindings/names.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace topg {
namespace {

[[noreturn]] void refuse(const std::string& message) { throw std::invalid_argument(message); }

void check_array(const AnyArray& array, const char* what, size_t rows, size_t columns, size_t bytes) {
  if (array.ndim() == 2 && array.shape(0) == rows && array.shape(1) == columns && array.itemsize() == bytes) return;
  refuse(std::string(what) + " must be [" + std::to_string(rows) + ", " + std::to_string(columns) + "] with " +
         std::to_string(bytes) + " bytes each");
}

size_t value_bytes(WeightCode code) {
  return code == WeightCode::kFloat32 ? 4 : code == WeightCode::kFloat16 || code == WeightCode::kBFloat16 ? 2 : 1;
}

// A source is a tuple (values or codes, scales or None, minimums or None).
StoredWeight stored(const WeightFormat& format, nb::handle source, int rows, int columns) {
  const auto parts = nb::cast<nb::tuple>(source);
  if (parts.size() != 3) refuse("a source of a weight is (values, scales or None, minimums or None)");
  const size_t padded = size_t(format.grouped() ? round_up(columns, format.group) : columns);
  const size_t stored_columns = format.code == WeightCode::kInt4 ? padded / 2 : padded;
  const auto data = [&](size_t index, const char* what, bool wanted, size_t width, size_t bytes) -> const void* {
    if (!wanted) {
      if (!parts[index].is_none()) refuse(std::string(what) + " were given for a format without them");
      return nullptr;
    }
    constexpr bool kConvert = false;  // a converted copy would be gone before it is packed
    AnyArray array;
    if (!nb::try_cast<AnyArray>(parts[index], array, kConvert)) {
      refuse(std::string(what) + " of a weight must be a C-contiguous array in the processor's memory");
    }
    check_array(array, what, size_t(rows), width, bytes);
    return array.data();
  };
  StoredWeight weight;
  weight.values = data(0, "values", true, stored_columns, value_bytes(format.code));
  const size_t groups = format.grouped() ? padded / size_t(format.group) : 0, bytes = size_t(scale_bytes(format.scale));
  weight.scales = data(1, "scales", format.grouped(), groups, bytes);
  weight.minimums = data(2, "minimums", format.minimum, groups, bytes);
  weight.rows = rows, weight.columns = columns;
  return weight;
}

int add_weight(Engine& engine, const std::string& code, const std::string& activation, const std::string& scale, int group,
               bool minimum, bool rotated, int rows, int columns, const nb::list& sources) {
  constexpr int kMostGroup = 1024;
  if (rows < 1 || columns < 1 || rows > 1 << 28 || columns > 1 << 28) refuse("a weight needs at least one row and column");
  if (group < 0 || group > kMostGroup || group % 2 != 0) {
    refuse("a group of " + std::to_string(group) + " columns; allowed: even numbers up to " + std::to_string(kMostGroup));
  }
  if (sources.size() < 1 || sources.size() > 2) refuse("a weight has one source, or two that are interleaved");
  const WeightFormat format{weight_code(code), activation_code(activation), scale_type(scale), group, minimum};
  if (format.grouped() != (format.scale != ScaleType::kNone)) refuse("groups and scales come together");
  StoredWeight weights[2];
  for (size_t i = 0; i < sources.size(); ++i) weights[i] = stored(format, sources[i], rows, columns);
  nb::gil_scoped_release release;
  return engine.add_weight(format, rotated, weights, int(sources.size()));
}

template <class T>
Span<T> span(const Vector<T>& array) {
  return {array.data(), array.size()};
}

nb::ndarray<nb::numpy, float> run(Engine& engine, const Vector<int32_t>& tokens, const Vector<int32_t>& starts,
                                  const Vector<int32_t>& counts, const Vector<int32_t>& page_offsets,
                                  const Vector<int32_t>& pages, const Vector<uint8_t>& wanted) {
  const StepArrays arrays = {span(tokens), span(starts), span(counts), span(page_offsets), span(pages), span(wanted)};
  auto logits = new_matrix<float>(size_t(engine.output_rows(arrays)), size_t(engine.model().vocab));
  nb::gil_scoped_release release;
  engine.run(arrays, {logits.data(), nullptr});
  return logits;
}

// The best token of each row whose logits are wanted; -1 where they are not usable numbers.
nb::ndarray<nb::numpy, int32_t> greedy(Engine& engine, const Vector<int32_t>& tokens, const Vector<int32_t>& starts,
                                       const Vector<int32_t>& counts, const Vector<int32_t>& page_offsets,
                                       const Vector<int32_t>& pages, const Vector<uint8_t>& wanted) {
  const StepArrays arrays = {span(tokens), span(starts), span(counts), span(page_offsets), span(pages), span(wanted)};
  const size_t rows = size_t(engine.output_rows(arrays));
  auto best_tokens = new_vector<int32_t>(rows);
  std::vector<Best> best(rows);
  nb::gil_scoped_release release;
  engine.run(arrays, {nullptr, best.data()});
  for (size_t row = 0; row < rows; ++row) best_tokens.data()[row] = best[row].unusable ? -1 : best[row].channel;
  return best_tokens;
}

// Seconds by step, the mean of the threads, and at barriers.
nb::dict profile_of(const Engine& engine) {
  const Profile profile = engine.profile();
  std::vector<double> steps(profile.empty() ? 0 : profile.front().steps.size());
  double waiting = 0;
  for (const ThreadProfile& thread : profile) {
    waiting += thread.waiting / double(profile.size());
    for (size_t i = 0; i < steps.size(); ++i) steps[i] += thread.steps[i] / double(profile.size());
  }
  nb::dict result;
  result["steps"] = steps;
  result["waiting"] = waiting;
  return result;
}

void bind_row_ops(nb::module_& module) {
  nb::class_<Norm>(module, "Norm")
      .def(nb::init<>())
      .def("__init__",
           [](Norm* self, const std::string& kind, int weight, int bias, int width, int runs, float eps) {
             new (self) Norm{norm_kind(kind), weight, bias, width, runs, eps};
           },
           "kind"_a, "weight"_a, "bias"_a, "width"_a, "runs"_a, "eps"_a);
  nb::class_<RowOp>(module, "RowOp")
      .def_static("embed", [](int weight, int out) { return RowOp(EmbedOp{weight, out}); }, "weight"_a, "out"_a)
      .def_static("norm", [](const Norm& norm, int input, int out) { return RowOp(NormOp{norm, input, out}); }, "norm"_a,
                  "input"_a, "out"_a)
      .def_static("add", [](int left, int right, int out) { return RowOp(AddOp{left, right, out}); }, "left"_a, "right"_a,
                  "out"_a)
      .def_static("scale", [](int input, float factor, int out) { return RowOp(ScaleOp{input, factor, out}); }, "input"_a,
                  "factor"_a, "out"_a)
      .def_static("activate",
                  [](const std::string& function, int input, int out) {
                    return RowOp(ActivateOp{activation_function(function), input, out});
                  },
                  "function"_a, "input"_a, "out"_a)
      .def_static("gate",
                  [](const std::string& function, int gate, int up, int out) {
                    return RowOp(GateOp{activation_function(function), gate, up, out});
                  },
                  "function"_a, "gate"_a, "up"_a, "out"_a)
      .def_static("select", [](int input, int out) { return RowOp(SelectOp{input, out}); }, "input"_a, "out"_a)
      .def_static("prepare", [](int input, int activations) { return RowOp(PrepareOp{input, activations}); }, "input"_a,
                  "activations"_a)
      .def_static("heads", [](const HeadsOp& heads) { return RowOp(heads); }, "heads"_a);
  nb::class_<HeadsOp>(module, "Heads")
      .def("__init__",
           [](HeadsOp* self, int attention, int query, int key, int value, const Norm& query_norm, const Norm& key_norm) {
             new (self) HeadsOp{attention, query, key, value, query_norm, key_norm};
           },
           "attention"_a, "query"_a, "key"_a, "value"_a, "query_norm"_a, "key_norm"_a);
  nb::class_<LinearPart>(module, "LinearPart")
      .def("__init__",
           [](LinearPart* self, int weight, int bias, const std::string& what, const std::string& function, int buffer,
              int activations) {
             new (self) LinearPart{weight, bias, epilogue(what), activation_function(function), buffer, activations};
           },
           "weight"_a, "bias"_a, "epilogue"_a, "function"_a, "buffer"_a, "activations"_a);
}

void bind_building(nb::class_<Engine>& engine) {
  engine
      .def("__init__",
           [](Engine* self, const std::string& isa, int threads, int rows, int logits_rows, int positions) {
             new (self) Engine(EngineOptions{isa, threads, rows, logits_rows, positions});
           },
           "isa"_a, "threads"_a, "rows"_a, "logits_rows"_a, "positions"_a)
      .def("add_weight", add_weight, "code"_a, "activation"_a, "scale"_a, "group"_a, "minimum"_a, "rotated"_a, "rows"_a,
           "columns"_a, "sources"_a)
      .def("add_vector",
           [](Engine& self, const Vector<float>& values) {
             return self.add_vector(values.data(), checked_int(values.size(), "a vector"));
           },
           "values"_a)
      .def("add_buffer", &Engine::add_buffer, "width"_a)
      .def("add_activations",
           [](Engine& self, const std::string& code, int group, int dot_group, bool rotated, int columns) {
             return self.add_activations({activation_code(code), group, dot_group, rotated}, columns);
           },
           "code"_a, "group"_a, "dot_group"_a, "rotated"_a, "columns"_a)
      .def("add_rope", &Engine::add_rope, "half"_a)
      .def("set_rope",
           [](Engine& self, int id, const Matrix<float>& cos, const Matrix<float>& sin) {
             const bool alike = cos.shape(0) == sin.shape(0) && cos.shape(1) == sin.shape(1);
             if (!alike) refuse("cos and sin must have the same shape");
             self.set_rope(id, cos.data(), sin.data(), checked_int(cos.shape(0), "positions"), int(cos.shape(1)));
           },
           "id"_a, "cos"_a, "sin"_a)
      .def("set_cache",
           [](Engine& self, const std::string& type, int layers, int kv_heads, int head_dim, int tokens_per_page,
              int pages) {
             self.set_cache({kv_type(type), layers, kv_heads, head_dim, tokens_per_page}, pages);
           },
           "type"_a, "layers"_a, "kv_heads"_a, "head_dim"_a, "tokens_per_page"_a, "pages"_a)
      .def("add_attention",
           [](Engine& self, int layer, int heads, float scale, float softcap, int window, int rope) {
             Attention attention;
             attention.layer = layer, attention.rope = rope;
             attention.shape.heads = heads, attention.shape.scale = scale;
             attention.shape.softcap = softcap, attention.shape.window = window;
             return self.add_attention(attention);
           },
           "layer"_a, "heads"_a, "scale"_a, "softcap"_a, "window"_a, "rope"_a)
      .def("add_row_step", [](Engine& self, const std::vector<RowOp>& ops) { self.add_step(RowStep{ops}); }, "ops"_a)
      .def("add_linear_step",
           [](Engine& self, int x, const std::vector<LinearPart>& parts, const HeadsOp* heads) {
             LinearStep step{x, parts};
             step.has_heads = heads != nullptr;
             if (heads != nullptr) step.heads = *heads;
             self.add_step(step);
           },
           "x"_a, "parts"_a, "heads"_a.none())
      .def("add_attention_step",
           [](Engine& self, int attention, int buffer, int activations) {
             self.add_step(AttentionStep{attention, buffer, activations});
           },
           "attention"_a, "buffer"_a, "activations"_a)
      .def("add_logits_step",
           [](Engine& self, int x, int weight, float softcap) { self.add_step(LogitsStep{x, weight, softcap}); }, "x"_a,
           "weight"_a, "softcap"_a)
      .def("finish", &Engine::finish, nb::call_guard<nb::gil_scoped_release>());
}

}  // namespace

void bind_engine(nb::module_& module) {
  module.attr("NONE") = kNone;
  module.attr("SCRATCH") = kScratch;
  module.def("page_bytes",
             [](const std::string& type, int layers, int kv_heads, int head_dim, int tokens_per_page) {
               const KVLayout layout{kv_type(type), layers, kv_heads, head_dim, tokens_per_page};
               check_layout(layout);
               return layout.page_bytes();
             },
             "type"_a, "layers"_a, "kv_heads"_a, "head_dim"_a, "tokens_per_page"_a, "Bytes of a page of the KV cache.");
  bind_row_ops(module);
  nb::class_<Engine> engine(module, "Engine");
  bind_building(engine);
  engine
      .def("run", run, "tokens"_a, "starts"_a, "counts"_a, "page_offsets"_a, "pages"_a, "wanted"_a,
           "Logits [rows wanted, vocab] of a step.")
      .def("greedy", greedy, "tokens"_a, "starts"_a, "counts"_a, "page_offsets"_a, "pages"_a, "wanted"_a,
           "The best token of each row wanted; -1 where the logits are not usable numbers.")
      .def("set_profiling", &Engine::set_profiling, "on"_a, "Whether steps are timed from now on; times start at zero.")
      .def("profile", profile_of,
           "Seconds since profiling began, the mean of the threads: \"steps\", one number a step of the program, and "
           "\"waiting\" at barriers.")
      .def("copy_page", &Engine::copy_page, "source"_a, "target"_a)
      .def("kernel_of", [](const Engine& self, int weight) { return self.kernel_name(weight); }, "weight"_a,
           "Name of the kernel that multiplies with a weight.")
      .def_prop_ro("isa", [](const Engine& self) { return std::string(self.kernels().isa); })
      .def_prop_ro("threads", [](Engine& self) { return self.pool().size(); })
      .def_prop_ro("weight_bytes", &Engine::weight_bytes)
      .def_prop_ro("workspace_bytes", &Engine::workspace_bytes);
}

}  // namespace topg
