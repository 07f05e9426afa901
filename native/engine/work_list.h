// The attention of a step, cut into items that threads take one after the other.
#pragma once

#include <vector>

#include "engine/model.h"
#include "engine/step_input.h"

namespace topg {

// A part of an attention's work: see AttentionItem.
struct WorkItem {
  int slice, kv_head;
  int first_row, rows;
  int block;  // the only key block, when blocks are kept; -1 for all of them
  long cost;
};

// Key blocks [first, last) that a token sees.
inline int last_block(int position) { return position / kKeyBlock + 1; }
inline int first_block(const AttentionShape& shape, int position) {
  return shape.window == 0 || position < shape.window ? 0 : (position - shape.window + 1) / kKeyBlock;
}

// Room for the states of key blocks, in rows times blocks: a few rows of the longest sequence, or more of shorter ones.
constexpr int kKeptRows = 4;

class WorkList {
 public:
  WorkList(const Model& model, int threads, int rows, int positions);

  // Items of a step, the most expensive first.
  void fill(const StepInput& input);
  // Every key block is an item of its own, because there would be too few items for the threads otherwise.
  bool keeps_blocks() const { return keeps_blocks_; }
  int size() const { return int(items_.size()); }
  const WorkItem& operator[](int index) const { return items_[size_t(index)]; }

 private:
  bool must_keep_blocks(const StepInput& input) const;

  const int kv_heads_, threads_;
  const long room_;  // rows times blocks that can be kept
  std::vector<WorkItem> items_;
  bool keeps_blocks_ = false;
};

}  // namespace topg
