// Whether a step fits the model it is added to.
#include <algorithm>
#include <stdexcept>
#include <string>

#include "engine/engine.h"

namespace topg {
namespace {

[[noreturn]] void refuse(const std::string& message) { throw std::invalid_argument(message); }

std::string number(long value) { return std::to_string(value); }

class Checker {
 public:
  explicit Checker(const Model& model) : model_(model) {}

  void operator()(const RowStep& step) const {
    for (const RowOp& op : step.ops) std::visit([&](const auto& o) { check(o); }, op);
  }

  void operator()(const LinearStep& step) const {
    id("activations", step.x, model_.activations.size());
    if (step.parts.empty()) refuse("a linear step has no parts");
    for (const LinearPart& part : step.parts) check(part, step.x);
    if (!step.has_heads) return;
    check(step.heads);
    const int head_dim = model_.attentions[size_t(step.heads.attention)].shape.kv.head_dim;
    if (step.parts.size() != 3) refuse("a linear step with heads has query, key and value as its parts");
    if (head_dim % kBlockChannels != 0) {
      refuse("heads of " + number(head_dim) + " values do not fill blocks of " + number(kBlockChannels) + " channels");
    }
    const int buffers[] = {step.heads.query, step.heads.key, step.heads.value};
    for (int i = 0; i < 3; ++i) {
      const LinearPart& part = step.parts[size_t(i)];
      if (part.epilogue == Epilogue::kStore && part.buffer == buffers[i]) continue;
      refuse("heads must be stored where they are finished");
    }
  }

  void operator()(const AttentionStep& step) const {
    id("attention", step.attention, model_.attentions.size());
    const AttentionShape& shape = model_.attentions[size_t(step.attention)].shape;
    const int width = shape.heads * shape.kv.head_dim;
    one_target(step.buffer, step.activations);
    if (step.buffer != kNone) return buffer(step.buffer, width);
    activations(step.activations, width);
    const int span = model_.activations[size_t(step.activations)].span(), share = shape.group() * shape.kv.head_dim;
    if (share % span != 0) {
      refuse("the heads of a KV head have " + number(share) + " values, which are not whole groups of " + number(span));
    }
  }

  void operator()(const LogitsStep& step) const {
    multiplies(step.weight, step.x);
  }

 private:
  static void id(const char* what, int value, size_t count) {
    if (value < 0 || size_t(value) >= count) refuse(std::string(what) + " " + number(value) + " does not exist");
  }

  static void one_target(int buffer, int activations) {
    if ((buffer == kNone) == (activations == kNone)) refuse("a result goes into a buffer or into activations, not both");
  }

  void buffer(int value, long wanted) const {
    const int given = width(value);
    if (given != wanted) refuse("buffer " + number(value) + " is " + number(given) + " wide; it must be " + number(wanted));
  }

  // A buffer, or the scratch row, which is as wide as the widest buffer.
  void row(int value, long wanted) const {
    if (value != kScratch) return buffer(value, wanted);
    int widest = 0;
    for (int given : model_.buffers) widest = std::max(widest, given);
    if (wanted > widest) {
      refuse("the scratch row is " + number(widest) + " wide, as the widest buffer is; needed: " + number(wanted));
    }
  }

  int width(int value) const {
    id("buffer", value, model_.buffers.size());
    return model_.buffers[size_t(value)];
  }

  void vector(int value, int count) const {
    if (value == kNone) return;
    id("vector", value, model_.vectors.size());
    const int given = int(model_.vectors[size_t(value)].size());
    if (given != round_up(count, kBlockChannels)) {
      refuse("vector " + number(value) + " has " + number(given) + " values; needed: " + number(count));
    }
  }

  void activations(int value, int columns) const {
    id("activations", value, model_.activations.size());
    const int given = model_.activations[size_t(value)].columns;
    if (given != columns) {
      refuse("activations " + number(value) + " have " + number(given) + " columns; needed: " + number(columns));
    }
  }

  const PackedWeight& weight(int value) const {
    id("weight", value, model_.weights.size());
    return model_.weights[size_t(value)].packed;
  }

  void multiplies(int weight_id, int x) const {
    const PackedWeight& packed = weight(weight_id);
    activations(x, packed.columns);
    const ActivationFormat& given = model_.activations[size_t(x)].format;
    const bool dots = packed.format.activation != ActivationCode::kInt8 || given.dot_group == packed.format.group;
    if (given.code != packed.format.activation || given.rotated != packed.rotated || !dots) {
      refuse("activations " + number(x) + " are not in the form that weight " + number(weight_id) + " is multiplied with");
    }
    const int filled = model_.activations[size_t(x)].padded_columns();
    const int expected = padded_columns(packed.format, packed.columns);
    if (filled != expected) {
      refuse("activations " + number(x) + " are filled up to " + number(filled) + " columns, weight " + number(weight_id) +
             " to " + number(expected));
    }
  }

  void check(const Norm& norm) const {
    if (norm.runs < 1 || norm.width < 1) {
      refuse("a norm of " + number(norm.runs) + " runs of " + number(norm.width) + " values; both must be at least 1");
    }
    vector(norm.weight, norm.width);
    vector(norm.bias, norm.width);
  }

  void check(const EmbedOp& op) const {
    row(op.out, weight(op.weight).columns);
  }
  void check(const NormOp& op) const {
    check(op.norm);
    row(op.input, long(op.norm.runs) * op.norm.width);
    row(op.out, long(op.norm.runs) * op.norm.width);
  }
  void check(const AddOp& op) const {
    row(op.left, width(op.out));
    row(op.right, width(op.out));
  }
  void check(const ScaleOp& op) const { row(op.input, width(op.out)); }
  void check(const ActivateOp& op) const { row(op.input, width(op.out)); }
  void check(const GateOp& op) const {
    row(op.gate, width(op.out));
    row(op.up, width(op.out));
  }
  void check(const SelectOp& op) const { row(op.out, width(op.input)); }
  void check(const PrepareOp& op) const {
    id("activations", op.activations, model_.activations.size());
    row(op.input, model_.activations[size_t(op.activations)].columns);
  }

  void check(const HeadsOp& op) const {
    id("attention", op.attention, model_.attentions.size());
    const AttentionShape& shape = model_.attentions[size_t(op.attention)].shape;
    const int head_dim = shape.kv.head_dim;
    buffer(op.query, shape.heads * head_dim);
    buffer(op.key, shape.kv.kv_heads * head_dim);
    buffer(op.value, shape.kv.kv_heads * head_dim);
    for (const Norm* norm : {&op.query_norm, &op.key_norm}) {
      if (norm->weight != kNone) vector(norm->weight, head_dim), vector(norm->bias, head_dim);
      if (norm->weight != kNone && norm->width != head_dim) refuse("a norm of heads is as wide as a head");
    }
  }

  void check(const LinearPart& part, int x) const {
    multiplies(part.weight, x);
    const int channels = weight(part.weight).channels, results = part.epilogue == Epilogue::kGate ? channels / 2 : channels;
    vector(part.bias, channels);
    one_target(part.buffer, part.activations);
    const int target = part.buffer != kNone ? width(part.buffer) : 0;
    if (part.activations != kNone) {
      id("activations", part.activations, model_.activations.size());
      if (part.epilogue != Epilogue::kGate && part.epilogue != Epilogue::kActivate) {
        refuse("only activated and gated results go straight into activations");
      }
    }
    const int wanted = part.buffer != kNone ? target : model_.activations[size_t(part.activations)].columns;
    // A gate's channels are filled up to whole vectors.
    const bool fits = part.epilogue == Epilogue::kGate ? results == round_up(wanted, kLanes) : results == wanted;
    if (fits) return;
    refuse("weight " + number(part.weight) + " gives " + number(results) + " results; the target takes " + number(wanted));
  }

  const Model& model_;
};

}  // namespace

void check_step(const Model& model, const ProgramStep& step) { std::visit(Checker(model), step); }

}  // namespace topg
