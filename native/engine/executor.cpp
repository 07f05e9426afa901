#include "engine/executor.h"

#include <algorithm>

#include "runtime/prefetch.h"

namespace topg {
namespace {

template <class Step>
const Step* as(const ProgramStep& step) {
  return std::get_if<Step>(&step);
}

}  // namespace

Executor::Executor(const ExecutorParts& parts, const StepOutput& output)
    : kernels_(parts.kernels),
      model_(parts.model),
      cache_(parts.cache),
      input_(parts.input),
      work_(parts.work),
      workspace_(parts.workspace),
      threads_(parts.threads),
      profile_(parts.profile),
      output_(output) {}

void Executor::run(int thread) const {
  StepClock clock(profile_ == nullptr ? nullptr : &(*profile_)[size_t(thread)]);
  const bool many_rows = input_.rows() >= std::max(kRowModeRows, kRowModeRowsOfThread * threads_.size());
  const size_t first_selected = model_.facts.first_selected;
  const size_t steps = input_.selected_rows() == 0 ? first_selected : model_.steps.size();
  for (size_t step = 0; step < steps;) {
    if (many_rows && step < first_selected && is_row_local(model_.steps[step])) {
      step = by_rows(step, thread, clock);
    } else {
      by_channels(step, thread, clock);
      ++step;
    }
  }
}

// Rows that a step works on: after a selection, those whose logits are wanted.
int Executor::rows_at(size_t step) const {
  return step < model_.facts.first_selected ? input_.rows() : input_.selected_rows();
}

void Executor::meet(int thread, StepClock& clock) const {
  threads_.barrier(thread);
  clock.wait_done();
}

// Where the thread writes rows of activations from `first_row` on; it reads them from there afterwards.
ActivationRows& Executor::place(int activations, int first_row, Copies copies, int thread) const {
  ThreadSpace& space = workspace_.of(thread);
  const size_t id = size_t(activations);
  const bool own = copies == Copies::kOwn || (copies == Copies::kLocal && model_.facts.local[id]);
  ActivationRows& rows = space.current[id];
  rows.data = own ? space.own[id] : workspace_.activations(activations);
  rows.first_row = own ? first_row : 0;
  return rows;
}

// ---- few rows -----------------------------------------------------------------------------------------------------------

void Executor::by_channels(size_t index, int thread, StepClock& clock) const {
  const ProgramStep& step = model_.steps[index];
  const int rows = rows_at(index);
  if (const auto* row_ops = as<RowStep>(step)) {
    if (rows <= kPrivateRows && model_.facts.own_copies[index]) {
      row_step(*row_ops, {0, rows}, Copies::kOwn, thread);
      return clock.step_done(index);  // nobody waits for it
    }
    const Range mine = share(rows, thread, threads_.size());
    const bool all = index < model_.facts.first_selected;  // else no row goes into pages
    const Rows mine_safely = {all ? input_.boundary(mine.begin) : mine.begin, all ? input_.boundary(mine.end) : mine.end};
    row_step(*row_ops, mine_safely, Copies::kShared, thread);
  } else if (const auto* linear = as<LinearStep>(step)) {
    linear_by_channels(*linear, rows, thread);
  } else if (const auto* attention = as<AttentionStep>(step)) {
    attend(*attention, index, thread);
  } else {
    logits(std::get<LogitsStep>(step), thread);
  }
  warm_up(index + 1, thread);
  clock.step_done(index);
  meet(thread, clock);
}

// While the others finish, fetches the beginning of what this thread multiplies next.
void Executor::warm_up(size_t index, int thread) const {
  constexpr size_t kBytes = 32 << 10;  // about what arrives during a barrier; L2 holds it easily
  for (; index < model_.steps.size(); ++index) {
    int weight = kNone;
    if (const auto* linear = as<LinearStep>(model_.steps[index])) weight = linear->parts.front().weight;
    if (const auto* logits = as<LogitsStep>(model_.steps[index])) weight = logits->weight;
    if (weight == kNone) continue;
    const PackedWeight& packed = model_.weights[size_t(weight)].packed;
    const Range mine = share(packed.blocks(), thread, threads_.size());
    const size_t bytes = size_t(mine.end - mine.begin) * packed.bytes_per_block();
    prefetch_range(packed.block(mine.begin), std::min(bytes, kBytes));
    return;
  }
}

// ---- many rows ----------------------------------------------------------------------------------------------------------

// Takes blocks of rows through all row-local steps from `first` on; returns the step after them.
size_t Executor::by_rows(size_t first, int thread, StepClock& clock) const {
  size_t last = first;
  while (last < model_.facts.first_selected && is_row_local(model_.steps[last])) ++last;
  const int rows = input_.rows(), threads = threads_.size();
  const int blocks = round_up(std::max(threads, (rows + kRowBlock - 1) / kRowBlock), threads);
  const int unit = row_unit(first, last);
  const auto edge = [&](int block) {
    const int even = int(long(rows) * block / blocks);
    return block == blocks ? rows : input_.boundary((even + unit / 2) / unit * unit);
  };
  std::atomic<int>& counter = workspace_.counter(first);
  for (int block; (block = counter.fetch_add(1, std::memory_order_relaxed)) < blocks;) {
    const Rows mine{edge(block), edge(block + 1)};
    if (mine.count() == 0) continue;
    for (size_t step = first; step < last; ++step) {
      if (const auto* row_ops = as<RowStep>(model_.steps[step])) {
        row_step(*row_ops, mine, Copies::kLocal, thread);
      } else {
        linear_by_rows(std::get<LinearStep>(model_.steps[step]), mine, thread);
      }
      clock.step_done(step);
    }
  }
  meet(thread, clock);
  return last;
}

// Row blocks end where tiles do when a kernel's tiles are large; small ones fit blocks of any size well enough, and threads
// that finish together matter more.
int Executor::row_unit(size_t first, size_t last) const {
  constexpr int kLargeTile = 16;
  for (size_t step = first; step < last; ++step) {
    const auto* linear = as<LinearStep>(model_.steps[step]);
    if (linear == nullptr) continue;
    if (model_.weights[size_t(linear->parts.front().weight)].kernel.max_rows % kLargeTile == 0) return kLargeTile;
  }
  return 1;
}

}  // namespace topg
