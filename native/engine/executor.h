// Runs a model's steps, all threads together.  One object lives for one step of the engine.
//
// Two modes (program.h): `by_channels` for few rows, `by_rows` for many.
#pragma once

#include "engine/kv_cache.h"
#include "engine/model.h"
#include "engine/profile.h"
#include "engine/step_input.h"
#include "engine/work_list.h"
#include "engine/workspace.h"
#include "runtime/thread_pool.h"

namespace topg {

// From so many rows on, and so many for each thread, rows are split among threads instead of channels: with fewer, reading
// all weights for each block of rows costs more than meeting after each step.
constexpr int kRowModeRows = 64, kRowModeRowsOfThread = 32;

// Where a step's results go; either may be null.
struct StepOutput {
  float* logits = nullptr;  // [selected rows][vocab]
  Best* best = nullptr;     // [selected rows]
};

// What a step is computed with and from.
struct ExecutorParts {
  const Kernels& kernels;
  const Model& model;
  const KVCache& cache;
  const StepInput& input;
  const WorkList& work;
  Workspace& workspace;
  ThreadPool& threads;
  Profile* profile;  // null: not wanted
};

class Executor {
 public:
  Executor(const ExecutorParts& parts, const StepOutput& output);

  // Called by every thread.
  void run(int thread) const;

 private:
  struct Rows {  // rows [begin, end) of the step, or of the selected rows
    int begin, end;
    int count() const { return end - begin; }
  };
  struct Heads {
    int begin, end;
  };
  enum class HeadKind { kQuery, kKey, kValue };
  // Where a row step puts what linears read.
  enum class Copies {
    kShared,  // one copy of all rows
    kOwn,     // the thread's own, of the rows it works on
    kLocal,   // the same for activations that nobody else reads, shared for others
  };

  // executor.cpp
  void by_channels(size_t step, int thread, StepClock& clock) const;
  size_t by_rows(size_t step, int thread, StepClock& clock) const;
  void meet(int thread, StepClock& clock) const;
  int row_unit(size_t first, size_t last) const;
  int rows_at(size_t step) const;
  void warm_up(size_t step, int thread) const;
  ActivationRows& place(int activations, int first_row, Copies copies, int thread) const;

  // row_step.cpp
  void row_step(const RowStep& step, Rows rows, Copies copies, int thread) const;
  void row_op(const RowOp& op, int row, int thread) const;
  void apply_norm(const Norm& norm, int runs, const float* x, float* out) const;
  float* buffer(int id, int row, int thread) const;
  void heads(const HeadsOp& op, HeadKind kind, Rows rows, Heads heads) const;

  // linear_step.cpp
  void linear_by_channels(const LinearStep& step, int rows, int thread) const;
  void linear_by_rows(const LinearStep& step, Rows rows, int thread) const;
  void linear_part(const LinearStep& step, size_t index, Rows rows, Range units, int thread) const;
  void write_block(const LinearPart& part, const float* c, int rows, int block, float* out, ptrdiff_t stride) const;
  void prepare_unit(const LinearPart& part, Rows rows, int unit, const float* columns, int thread) const;
  int unit_blocks(const LinearStep& step, const LinearPart& part) const;
  int unit_count(const LinearStep& step, const LinearPart& part) const;

  // attention_step.cpp
  void attend(const AttentionStep& step, size_t index, int thread) const;
  void attend_item(const AttentionStep& step, const WorkItem& item, const WorkItem* next, int thread) const;
  void fold_blocks(const AttentionStep& step, int thread) const;
  AttentionState block_states(const AttentionShape& shape, int block, int kv_head, int row) const;
  void write_heads(const AttentionStep& step, int row, int kv_head, const float* out, const float* total,
                   int thread) const;
  AttentionItem attention_item(const Attention& attention, const WorkItem& item) const;

  // logits_step.cpp
  void logits(const LogitsStep& step, int thread) const;
  void choose_best(int thread) const;

  const Kernels& kernels_;
  const Model& model_;
  const KVCache& cache_;
  const StepInput& input_;
  const WorkList& work_;
  Workspace& workspace_;
  ThreadPool& threads_;
  Profile* const profile_;
  const StepOutput output_;
};

}  // namespace topg
