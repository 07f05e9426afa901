#include "engine/engine.h"

#include <algorithm>
#include <climits>
#include <iterator>
#include <stdexcept>
#include <utility>

#include "runtime/isa.h"

#if defined(TOPG_X86)
#include <immintrin.h>
#endif

namespace topg {
namespace {

[[noreturn]] void refuse(const std::string& message) { throw std::invalid_argument(message); }

constexpr int kMostRows = 1 << 20, kMostPositions = 1 << 24;

void check_range(const char* what, long value, long least, long most) {
  if (value >= least && value <= most) return;
  refuse(std::string(what) + " is " + std::to_string(value) + "; allowed: " + std::to_string(least) + " to " +
         std::to_string(most));
}

const EngineOptions& checked(const EngineOptions& options) {
  check_range("rows", options.rows, 1, kMostRows);
  check_range("logits_rows", options.logits_rows, 1, options.rows);
  check_range("positions", options.positions, 1, kMostPositions);
  return options;
}

void check_format(const ActivationFormat& format) {
  if (format.code != ActivationCode::kInt8) {
    return check_range("the group of activations without scales", format.group, 0, 0);
  }
  constexpr int kGroups[] = {16, 32, 64, 128, 256};  // that RowKernels::prepare knows
  if (std::find(std::begin(kGroups), std::end(kGroups), format.group) == std::end(kGroups)) {
    refuse("int8 activations have groups of " + std::to_string(format.group) + "; allowed: 16, 32, 64, 128, 256");
  }
  if (format.dot_group < kLanes || format.dot_group % kLanes != 0 || format.group % format.dot_group != 0) {
    refuse("a dot group of " + std::to_string(format.dot_group) +
           " columns; allowed: multiples of 16 that divide the group of " + std::to_string(format.group));
  }
}

// Ids below it can be looked up in every embedding.
int count_tokens(const Model& model) {
  int count = model.vocab;
  for (const ProgramStep& step : model.steps) {
    const auto* rows = std::get_if<RowStep>(&step);
    if (rows == nullptr) continue;
    for (const RowOp& op : rows->ops) {
      const auto* embed = std::get_if<EmbedOp>(&op);
      if (embed != nullptr) count = std::min(count, model.weights[size_t(embed->weight)].packed.channels);
    }
  }
  return count;
}

// The caller's thread belongs to somebody else: what a kernel needs is set for one step and put back.
class CallerState {
 public:
#if defined(TOPG_X86)
  CallerState() : control_(_mm_getcsr()) {}
  ~CallerState() { _mm_setcsr(control_); }

 private:
  unsigned control_;
#endif
};

}  // namespace

uint8_t* WeightStore::take(size_t bytes) {
  constexpr size_t kPiece = size_t(64) << 20, kLine = 64;
  if (pieces_.empty() || used_ + bytes > pieces_.back().size()) {
    pieces_.emplace_back(std::max(bytes, kPiece));
    used_ = 0;
  }
  uint8_t* taken = pieces_.back().data() + used_;
  used_ += (bytes + kLine - 1) / kLine * kLine;
  total_ += bytes;
  return taken;
}

Engine::Engine(const EngineOptions& options)
    : options_(checked(options)), kernels_(kernels_for(options.isa)), pool_(options.threads) {}

std::unique_lock<std::mutex> Engine::lock() const {
  pool_.check_process();
  return std::unique_lock<std::mutex>(mutex_);
}

std::unique_lock<std::mutex> Engine::lock_building() const {
  std::unique_lock<std::mutex> held = lock();
  if (workspace_) throw std::logic_error("the engine is finished; nothing can be added to it");
  return held;
}

void Engine::require_finished() const {
  if (!workspace_) throw std::logic_error("the engine is not finished; call finish first");
}

// ---- building -----------------------------------------------------------------------------------------------------------

int Engine::add_weight(const WeightFormat& format, bool rotated, const StoredWeight* sources, int source_count) {
  const std::unique_lock<std::mutex> held = lock_building();
  const LinearKernel kernel = kernels_.linear(format);
  if (kernel.name == nullptr) {
    refuse(std::string("instruction set ") + kernels_.isa + " has no kernel for this weight format");
  }
  PackedWeight packed;
  packed.format = format;
  packed.channels = packed_channels(sources[0].rows, source_count);
  packed.columns = sources[0].columns;
  packed.rotated = rotated;
  uint8_t* data = weights_.take(size_t(packed.blocks()) * packed.bytes_per_block());
  packed.data = data;
  pool_.run([&](int thread) {
    const Range mine = share(packed.blocks(), thread, pool_.size());
    pack_blocks(format, sources, source_count, mine.begin, mine.end, data);
  });
  model_.weights.push_back({packed, kernel});
  return int(model_.weights.size()) - 1;
}

std::string Engine::kernel_name(int weight) const {
  check_range("weight", weight, 0, long(model_.weights.size()) - 1);
  return model_.weights[size_t(weight)].kernel.name;
}

int Engine::add_vector(const float* values, int count) {
  const std::unique_lock<std::mutex> held = lock_building();
  std::vector<float> vector(size_t(round_up(count, kBlockChannels)), 0.0f);
  std::copy(values, values + count, vector.begin());
  model_.vectors.push_back(std::move(vector));
  return int(model_.vectors.size()) - 1;
}

int Engine::add_buffer(int width) {
  const std::unique_lock<std::mutex> held = lock_building();
  check_range("the width of a buffer", width, 1, kMostPositions);
  model_.buffers.push_back(width);
  return int(model_.buffers.size()) - 1;
}

int Engine::add_activations(const ActivationFormat& format, int columns) {
  const std::unique_lock<std::mutex> held = lock_building();
  check_format(format);
  check_range("the columns of activations", columns, 1, kMostPositions);
  model_.activations.push_back({format, columns});
  return int(model_.activations.size()) - 1;
}

int Engine::add_rope(int half) {
  const std::unique_lock<std::mutex> held = lock_building();
  check_range("half of the rotated values", half, 1, 1 << 16);
  model_.ropes.push_back({half, {}, {}});
  return int(model_.ropes.size()) - 1;
}

void Engine::set_rope(int id, const float* cos, const float* sin, int positions, int half) {
  const std::unique_lock<std::mutex> held = lock();
  check_range("rope table", id, 0, long(model_.ropes.size()) - 1);
  RopeTable& rope = model_.ropes[size_t(id)];
  check_range("the width of a rope table", half, rope.half, rope.half);
  const size_t count = size_t(positions) * size_t(rope.half);
  rope.cos.assign(cos, cos + count);
  rope.sin.assign(sin, sin + count);
}

void Engine::set_cache(const KVLayout& layout, int pages) {
  const std::unique_lock<std::mutex> held = lock_building();
  if (kernels_.attention(layout.type).name == nullptr) {
    refuse(std::string("instruction set ") + kernels_.isa + " has no attention kernel for this cache");
  }
  KVCache cache(layout, pages);
  if (!model_.attentions.empty()) refuse("the cache must be set before attentions are added");
  cache_ = std::move(cache);
  model_.kv = layout;
}

int Engine::add_attention(const Attention& attention) {
  const std::unique_lock<std::mutex> held = lock_building();
  Attention added = attention;
  added.shape.kv = model_.kv;
  check_range("the layer of an attention", added.layer, 0, model_.kv.layers - 1);
  if (added.shape.heads < 1 || added.shape.heads % model_.kv.kv_heads != 0) {
    refuse(std::to_string(added.shape.heads) + " query heads cannot share " + std::to_string(model_.kv.kv_heads) +
           " KV heads");
  }
  check_range("the window of an attention", added.shape.window, 0, INT_MAX);
  if (!(added.shape.softcap >= 0)) refuse("the soft cap of an attention must be at least 0 (none)");
  if (added.rope != kNone) {
    check_range("rope table", added.rope, 0, long(model_.ropes.size()) - 1);
    check_range("rotated values of a head", 2L * model_.ropes[size_t(added.rope)].half, 2, model_.kv.head_dim);
  }
  model_.attentions.push_back(added);
  return int(model_.attentions.size()) - 1;
}

void Engine::add_step(ProgramStep step) {
  const std::unique_lock<std::mutex> held = lock_building();
  if (!model_.steps.empty() && std::holds_alternative<LogitsStep>(model_.steps.back())) {
    refuse("a logits step ends a program; no step can follow it");
  }
  topg::check_step(model_, step);
  model_.steps.push_back(std::move(step));
}

void Engine::finish() {
  const std::unique_lock<std::mutex> held = lock_building();
  if (model_.steps.empty() || !std::holds_alternative<LogitsStep>(model_.steps.back())) {
    refuse("a program must end in a logits step");
  }
  if (cache_.pages() == 0) refuse("the engine has no cache; call set_cache first");
  const auto& logits = std::get<LogitsStep>(model_.steps.back());
  model_.vocab = model_.weights[size_t(logits.weight)].packed.channels;
  model_.token_count = count_tokens(model_);
  model_.facts = analyse(model_.steps, model_.activations.size());
  work_ = std::make_unique<WorkList>(model_, pool_.size(), options_.rows, options_.positions);
  const StepLimits limits = {options_.rows,      options_.logits_rows,      model_.token_count,
                             options_.positions, model_.kv.tokens_per_page, cache_.pages()};
  input_ = std::make_unique<StepInput>(limits);
  workspace_ = std::make_unique<Workspace>(
      model_, WorkspaceSize{pool_.size(), options_.rows, options_.logits_rows, options_.positions});
}

// ---- running ------------------------------------------------------------------------------------------------------------

int Engine::output_rows(const StepArrays& arrays) const {
  long rows = 0;
  for (size_t i = 0; i < std::min(arrays.wanted.size, arrays.counts.size); ++i) {
    const auto wanted = LogitsWanted(arrays.wanted.data[i]);
    rows += wanted == LogitsWanted::kAll ? std::max(0, arrays.counts.data[i]) : wanted == LogitsWanted::kLast ? 1 : 0;
  }
  return int(std::min<long>(rows, options_.logits_rows));
}

void Engine::check_rope_tables() const {
  int last = 0;
  for (const Slice& slice : input_->slices()) last = std::max(last, slice.start + slice.rows - 1);
  for (const RopeTable& rope : model_.ropes) {
    if (rope.positions() > last) continue;
    refuse("position " + std::to_string(last) + " has no angles; the rope table ends before position " +
           std::to_string(rope.positions()));
  }
}

void Engine::run(const StepArrays& arrays, const StepOutput& output) {
  run(arrays, output, [](int) {});
}

void Engine::run(const StepArrays& arrays, const StepOutput& output, const std::function<void(int thread)>& then) {
  const std::unique_lock<std::mutex> held = lock();
  require_finished();
  input_->set(arrays);
  check_rope_tables();
  work_->fill(*input_);
  workspace_->begin_step();
  Profile* const profile = profile_.empty() ? nullptr : &profile_;
  const Executor executor({kernels_, model_, cache_, *input_, *work_, *workspace_, pool_, profile}, output);
  const CallerState restored;
  pool_.run([&](int thread) {
    enter_isa(kernels_);
    executor.run(thread);
    then(thread);
  });
}

void Engine::copy_page(int source, int target) {
  const std::unique_lock<std::mutex> held = lock();
  require_finished();
  cache_.copy_page(source, target);
}

void Engine::set_profiling(bool on) {
  const std::unique_lock<std::mutex> held = lock();
  require_finished();
  profile_.clear();
  if (on) profile_.resize(size_t(pool_.size()), {std::vector<double>(model_.steps.size()), 0});
}

Profile Engine::profile() const {
  const std::unique_lock<std::mutex> held = lock();
  return profile_;
}

}  // namespace topg
