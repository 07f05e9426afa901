#include "engine/work_list.h"

#include <algorithm>

#include "engine/workspace.h"

namespace topg {

WorkList::WorkList(const Model& model, int threads, int rows, int positions)
    : kv_heads_(model.kv.kv_heads), threads_(threads), room_(long(kKeptRows) * last_block(positions - 1)) {
  items_.reserve(size_t(kv_heads_) * size_t(std::max<long>(rows, room_)));
}

bool WorkList::must_keep_blocks(const StepInput& input) const {
  constexpr int kItemsOfThread = 2;  // fewer leave threads idle while one finishes the longest
  int items = 0, most_blocks = 0;
  for (const Slice& slice : input.slices()) {
    items += (slice.rows + kItemTokens - 1) / kItemTokens * kv_heads_;
    most_blocks = std::max(most_blocks, last_block(slice.start + slice.rows - 1));
  }
  return items < kItemsOfThread * threads_ && long(input.rows()) * most_blocks <= room_;
}

void WorkList::fill(const StepInput& input) {
  items_.clear();
  keeps_blocks_ = must_keep_blocks(input);
  for (int index = 0; index < int(input.slices().size()); ++index) {
    const Slice& slice = input.slices()[size_t(index)];
    for (int first = 0; first < slice.rows; first += kItemTokens) {
      const int row = slice.first_row + first, rows = std::min(kItemTokens, slice.rows - first);
      const int keys = slice.start + first + rows;
      for (int head = 0; head < kv_heads_; ++head) {
        if (!keeps_blocks_) items_.push_back({index, head, row, rows, -1, long(rows) * keys});
        for (int block = 0; keeps_blocks_ && block < last_block(keys - 1); ++block) {
          items_.push_back({index, head, row, rows, block, std::min(kKeyBlock, keys - block * kKeyBlock)});
        }
      }
    }
  }
  // Which thread gets an item changes no result.
  std::sort(items_.begin(), items_.end(), [](const WorkItem& a, const WorkItem& b) { return a.cost > b.cost; });
}

}  // namespace topg
