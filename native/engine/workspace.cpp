#include "engine/workspace.h"

#include <algorithm>

#include "engine/work_list.h"

namespace topg {
namespace {

constexpr int kLineBytes = 64;

size_t element_bytes(ActivationCode code) {
  return code == ActivationCode::kFloat32 ? 4 : code == ActivationCode::kBFloat16 ? 2 : 1;
}

int slab_rows(const Model& model) {
  int rows = 1;
  for (const Weight& weight : model.weights) rows = std::max(rows, weight.kernel.max_rows);
  return rows;
}

int widest(const Model& model) {
  int width = kBlockChannels;
  for (int buffer : model.buffers) width = std::max(width, round_up(buffer, kBlockChannels));
  return width;
}

int largest_group(const Model& model) {
  int group = 1;
  for (const Attention& attention : model.attentions) group = std::max(group, attention.shape.group());
  return group;
}

int most_heads(const Model& model) {
  int heads = 0;
  for (const Attention& attention : model.attentions) heads = std::max(heads, attention.shape.heads);
  return heads;
}

}  // namespace

Workspace::Workspace(const Model& model, const WorkspaceSize& size)
    : counters_(new std::atomic<int>[model.steps.size()]), counter_count_(model.steps.size()) {
  for (const ActivationBuffer& buffer : model.activations) span_ = std::max(span_, buffer.span());
  lay_out(model, size);  // counts
  arena_.commit();
  lay_out(model, size);  // hands out
}

void Workspace::begin_step() {
  for (size_t i = 0; i < counter_count_; ++i) counters_[i].store(0, std::memory_order_relaxed);
  for (ThreadSpace& space : threads_) {
    for (size_t id = 0; id < activations_.size(); ++id) space.current[id] = {activations_[id], 0};
  }
}

void Workspace::lay_out(const Model& model, const WorkspaceSize& size) {
  strides_.clear(), buffers_.clear(), activations_.clear(), threads_.clear();
  for (int width : model.buffers) {
    strides_.push_back(round_up(width, kBlockChannels));
    buffers_.push_back(arena_.take<float>(size_t(size.rows) * size_t(strides_.back())));
  }
  for (const ActivationBuffer& buffer : model.activations) activations_.push_back(make_activations(buffer, size.rows));
  const size_t heads = size_t(most_heads(model));
  const size_t query_rows = size_t(size.rows) * heads;
  queries_.rows = size.rows;
  queries_.values = arena_.take<uint8_t>(query_rows * size_t(model.kv.dim()) * model.kv.element_bytes());
  queries_.scales = arena_.take<float>(query_rows);
  queries_.sums = arena_.take<int32_t>(query_rows);
  block_states_ = states(size_t(kKeptRows) * size_t(last_block(size.positions - 1)) * heads, model.kv.dim());
  logits_ = arena_.take<float>(size_t(size.logits_rows) * size_t(model.vocab));
  for (int thread = 0; thread < size.threads; ++thread) threads_.push_back(thread_space(model, size));
}

ThreadSpace Workspace::thread_space(const Model& model, const WorkspaceSize& size) {
  ThreadSpace space{};
  const int group = largest_group(model);
  space.slab = arena_.take<float>(size_t(slab_rows(model)) * kBlockChannels);
  space.columns = arena_.take<float>(size_t(std::max(size.rows, kRowBlock)) * size_t(span_));
  space.scratch = arena_.take<float>(size_t(widest(model)));
  space.heads = arena_.take<float>(size_t(group) * size_t(model.kv.head_dim) + kLanes);
  space.states = states(size_t(kItemTokens) * size_t(group), model.kv.dim());
  for (size_t i = 0; i < model.activations.size(); ++i) {
    space.own.push_back(make_activations(model.activations[i], model.facts.local[i] ? kMostBlockRows : kPrivateRows));
    space.current.push_back({activations_[i], 0});
  }
  space.best = arena_.take<Best>(size_t(size.logits_rows));
  return space;
}

AttentionState Workspace::states(size_t count, int dim) {
  return {arena_.take<float>(count * size_t(dim)), arena_.take<float>(count), arena_.take<float>(count)};
}

Activations Workspace::make_activations(const ActivationBuffer& buffer, int rows) {
  Activations made;
  const size_t element = element_bytes(buffer.format.code);
  made.format = buffer.format;
  made.columns = buffer.padded_columns();
  made.stride = round_up(int(size_t(made.columns) * element), kLineBytes) / ptrdiff_t(element);
  made.values = arena_.take<uint8_t>(size_t(rows) * size_t(made.stride) * element);
  if (buffer.format.code == ActivationCode::kInt8) {
    made.groups = buffer.groups();
    made.scales = arena_.take<float>(size_t(rows) * size_t(made.groups));
    made.sums = arena_.take<int32_t>(size_t(rows) * size_t(made.groups));
  }
  return made;
}

}  // namespace topg
