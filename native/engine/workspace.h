// Everything a step writes that is not KV pages, taken once at load.
#pragma once

#include <atomic>
#include <memory>
#include <vector>

#include "engine/model.h"
#include "runtime/memory.h"

namespace topg {

constexpr int kPrivateRows = 4;    // up to so many rows, every thread prepares its own copy of a linear's input
constexpr int kItemTokens = 32;    // query tokens of an attention item
constexpr int kRowBlock = 128;     // rows a thread takes through a segment at a time, about
constexpr int kMostBlockRows = 160;  // the same, rounded to the tiles of linears

struct WorkspaceSize {
  int threads, rows, logits_rows, positions;
};

// Where rows of activations lie: row r of the step is row r - first_row of `data`.
struct ActivationRows {
  Activations data;
  int first_row = 0;
};

// One thread's own memory.
struct ThreadSpace {
  float* slab;       // of `multiply`
  float* columns;    // [rows][span]: outputs on their way into activations
  float* scratch;    // one row, as wide as the widest buffer
  float* heads;      // query heads of one KV head, finished
  AttentionState states;  // [kItemTokens][group]
  Best* best;        // [logits rows]
  std::vector<Activations> own;         // by activations id: [kMostBlockRows], or [kPrivateRows] for those not local
  std::vector<ActivationRows> current;  // by activations id: where they were last written
};

class Workspace {
 public:
  Workspace(const Model& model, const WorkspaceSize& size);

  int stride(int buffer) const { return strides_[size_t(buffer)]; }
  float* row(int buffer, int row) const { return buffers_[size_t(buffer)] + ptrdiff_t(row) * stride(buffer); }
  const Activations& activations(int id) const { return activations_[size_t(id)]; }  // [rows], of all threads
  ThreadSpace& of(int thread) { return threads_[size_t(thread)]; }
  const Queries& queries() const { return queries_; }
  // States of key blocks that are folded later: [block][kv_head][rows of the step][group].
  const AttentionState& block_states() const { return block_states_; }
  float* logits() const { return logits_; }  // [logits rows][vocab]
  std::atomic<int>& counter(size_t step) { return counters_[step]; }
  // What every step begins with: nothing taken, and activations where all threads find them.  A thread that gets no work
  // before a barrier reads behind it what the others wrote.
  void begin_step();
  int span() const { return span_; }  // floats between rows of ThreadSpace::columns
  size_t size() const { return arena_.size(); }

 private:
  void lay_out(const Model& model, const WorkspaceSize& size);
  ThreadSpace thread_space(const Model& model, const WorkspaceSize& size);
  AttentionState states(size_t count, int dim);
  Activations make_activations(const ActivationBuffer& buffer, int rows);

  Arena arena_;
  std::vector<int> strides_;
  std::vector<float*> buffers_;
  std::vector<Activations> activations_;
  std::vector<ThreadSpace> threads_;
  Queries queries_;
  AttentionState block_states_{};
  float* logits_ = nullptr;
  int span_ = kRotationGroup;
  std::unique_ptr<std::atomic<int>[]> counters_;  // by step: what has been taken of its work
  size_t counter_count_ = 0;
};

}  // namespace topg
