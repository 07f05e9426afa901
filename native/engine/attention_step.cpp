// Executor: attention.  Items of work are taken from a shared list, so that threads finish together.
#include <algorithm>

#include "engine/executor.h"

namespace topg {

void Executor::attend(const AttentionStep& step, size_t index, int thread) const {
  if (step.activations != kNone) place(step.activations, 0, Copies::kShared, thread);
  std::atomic<int>& counter = workspace_.counter(index);
  for (int item; (item = counter.fetch_add(1, std::memory_order_relaxed)) < work_.size();) {
    const int next = item + threads_.size();  // a guess: what this thread gets when all take turns
    attend_item(step, work_[item], next < work_.size() ? &work_[next] : nullptr, thread);
  }
  if (!work_.keeps_blocks()) return;
  threads_.barrier(thread);
  fold_blocks(step, thread);
}

AttentionItem Executor::attention_item(const Attention& attention, const WorkItem& item) const {
  const int position = input_.position(item.first_row);
  const int first = first_block(attention.shape, position), last = last_block(position + item.rows - 1);
  AttentionItem made{item.first_row, item.rows, position, item.kv_head, first, last,
                     input_.slices()[size_t(item.slice)].pages, nullptr};
  if (item.block >= 0) {  // none when the window hides it; it is not folded either
    made.first_block = std::max(first, item.block);
    made.last_block = item.block + 1;
  }
  return made;
}

void Executor::attend_item(const AttentionStep& step, const WorkItem& item, const WorkItem* next, int thread) const {
  const Attention& attention = model_.attentions[size_t(step.attention)];
  const AttentionShape& shape = attention.shape;
  const AttentionKernel kernel = kernels_.attention(shape.kv.type);
  AttentionItem work = attention_item(attention, item), after;
  if (next != nullptr) {
    after = attention_item(attention, *next);
    if (after.first_block < after.last_block) work.next = &after;
  }
  if (item.block >= 0) {
    const AttentionState states = block_states(shape, item.block, item.kv_head, item.first_row);
    return kernel.attend(shape, workspace_.queries(), cache_.data(), attention.layer, work, states, true);
  }
  const AttentionState& states = workspace_.of(thread).states;
  kernel.attend(shape, workspace_.queries(), cache_.data(), attention.layer, work, states, false);
  const int group = shape.group();
  for (int i = 0; i < item.rows; ++i) {
    const float* out = states.out + ptrdiff_t(i) * group * shape.kv.dim();
    write_heads(step, item.first_row + i, item.kv_head, out, states.total + i * group, thread);
  }
}

// The state of a key block of one KV head, from the heads of `row` on.
AttentionState Executor::block_states(const AttentionShape& shape, int block, int kv_head, int row) const {
  const ptrdiff_t first = ((ptrdiff_t(block) * shape.kv.kv_heads + kv_head) * input_.rows() + row) * shape.group();
  const AttentionState& all = workspace_.block_states();
  return {all.out + first * shape.kv.dim(), all.maximum + first, all.total + first};
}

// Folds the key blocks of each row and KV head, in ascending order, into the first of them.
void Executor::fold_blocks(const AttentionStep& step, int thread) const {
  const AttentionShape& shape = model_.attentions[size_t(step.attention)].shape;
  const AttentionKernel kernel = kernels_.attention(shape.kv.type);
  const int dim = shape.kv.dim(), kv_heads = shape.kv.kv_heads;
  const Range mine = share(input_.rows() * kv_heads, thread, threads_.size());
  for (int task = mine.begin; task < mine.end; ++task) {
    const int row = task / kv_heads, kv_head = task % kv_heads, position = input_.position(row);
    const int first = first_block(shape, position);
    const AttentionState state = block_states(shape, first, kv_head, row);
    for (int block = first + 1; block < last_block(position); ++block) {
      const AttentionState later = block_states(shape, block, kv_head, row);
      for (int head = 0; head < shape.group(); ++head) {
        kernel.fold(shape, state.out + head * dim, state.maximum + head, state.total + head, later.out + head * dim,
                    later.maximum[head], later.total[head]);
      }
    }
    write_heads(step, row, kv_head, state.out, state.total, thread);
  }
}

// Finishes the query heads of one KV head of a row, and puts them where the next step reads them.
void Executor::write_heads(const AttentionStep& step, int row, int kv_head, const float* out, const float* total,
                           int thread) const {
  const AttentionShape& shape = model_.attentions[size_t(step.attention)].shape;
  const AttentionKernel kernel = kernels_.attention(shape.kv.type);
  const int head_dim = shape.kv.head_dim, group = shape.group(), width = group * head_dim;
  const bool into_buffer = step.buffer != kNone;
  float* heads = into_buffer ? workspace_.row(step.buffer, row) + kv_head * width : workspace_.of(thread).heads;
  for (int head = 0; head < group; ++head) {
    kernel.finish(shape, out + head * shape.kv.dim(), total[head], heads + head * head_dim);
  }
  if (into_buffer) return;
  const ActivationBuffer& buffer = model_.activations[size_t(step.activations)];
  const int groups = width / buffer.group_columns(), first = kv_head * groups;
  const int last = kv_head + 1 == shape.kv.kv_heads ? buffer.groups() : first + groups;
  kernels_.rows.prepare_groups(heads, width, workspace_.activations(step.activations), row, first, last);
}

}  // namespace topg
