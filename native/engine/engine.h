// The engine: a model is put together piece by piece, finished, and then runs steps.
#pragma once

#include <functional>
#include <memory>
#include <mutex>
#include <string>

#include "engine/executor.h"
#include "engine/model.h"
#include "engine/step_input.h"
#include "engine/workspace.h"
#include "kernels/pack.h"
#include "runtime/thread_pool.h"

namespace topg {

struct EngineOptions {
  std::string isa;      // "" for the best usable one
  int threads = 1;
  int rows = 0;         // of a step at most
  int logits_rows = 0;  // of a step whose logits are wanted, at most
  int positions = 0;    // tokens of a sequence at most
};

// Ids that the builders return count from 0 in each table.  Every builder throws std::invalid_argument for what does not
// fit.
// Calls of several threads wait for each other.  In a fork of the process everything throws std::runtime_error.
class Engine {
 public:
  explicit Engine(const EngineOptions& options);

  // ---- building ----
  int add_weight(const WeightFormat& format, bool rotated, const StoredWeight* sources, int source_count);
  int add_vector(const float* values, int count);
  int add_buffer(int width);
  int add_activations(const ActivationFormat& format, int columns);
  int add_rope(int half);
  // cos and sin [positions][half]; may be called again with more positions.
  void set_rope(int id, const float* cos, const float* sin, int positions, int half);
  void set_cache(const KVLayout& layout, int pages);
  int add_attention(const Attention& attention);
  void add_step(ProgramStep step);
  // Checks the program, takes the memory of steps and pages.  Nothing may be added afterwards.
  void finish();

  // ---- running ----
  // Computes a step; `output` has room for output_rows(arrays) rows.
  void run(const StepArrays& arrays, const StepOutput& output);
  // The same; every thread then calls then(thread) as part of the step, when all results stand in `output`.
  void run(const StepArrays& arrays, const StepOutput& output, const std::function<void(int thread)>& then);
  int output_rows(const StepArrays& arrays) const;
  float* logits() const { return workspace_->logits(); }  // [logits_rows][vocab]
  void copy_page(int source, int target);

  const Model& model() const { return model_; }
  const Kernels& kernels() const { return kernels_; }
  const EngineOptions& options() const { return options_; }
  ThreadPool& pool() { return pool_; }
  // Times start at zero.
  void set_profiling(bool on);
  Profile profile() const;  // empty while not profiling
  std::string kernel_name(int weight) const;
  size_t weight_bytes() const { return weights_.size(); }
  size_t workspace_bytes() const { return workspace_ ? workspace_->size() : 0; }

 private:
  std::unique_lock<std::mutex> lock() const;
  std::unique_lock<std::mutex> lock_building() const;
  void require_finished() const;
  void check_rope_tables() const;

  EngineOptions options_;
  const Kernels& kernels_;
  ThreadPool pool_;
  Model model_;
  WeightStore weights_;
  KVCache cache_;
  std::unique_ptr<Workspace> workspace_;
  std::unique_ptr<StepInput> input_;
  std::unique_ptr<WorkList> work_;
  Profile profile_;
  mutable std::mutex mutex_;  // of everything above, but the options, the kernels and the pool
};

// Throws std::invalid_argument unless every id of a step exists and every shape fits.
void check_step(const Model& model, const ProgramStep& step);

}  // namespace topg
