// What one step computes: any mix of sequences, each with any number of new tokens.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "kernels/layout.h"

namespace topg {

template <class T>
struct Span {
  const T* data = nullptr;
  size_t size = 0;
};

enum class LogitsWanted : uint8_t { kNothing, kLast, kAll };

// A step as the caller states it.  Slice i has counts[i] tokens, the first of them at position starts[i] of its sequence,
// and page table pages[page_offsets[i]] .. pages[page_offsets[i + 1] - 1].
struct StepArrays {
  Span<int32_t> tokens, starts, counts, page_offsets, pages;
  Span<uint8_t> wanted;  // LogitsWanted of each slice
};

// What a step may ask for.
struct StepLimits {
  int max_rows = 0;
  int max_logits_rows = 0;
  int vocab = 0;             // token ids below it exist
  int positions = 0;         // positions below it exist
  int tokens_per_page = 0;
  int pages = 0;
};

struct Slice {
  int first_row;
  int rows;
  int start;             // position of the first row's token
  const int32_t* pages;  // page table
};

// A step that was checked: nothing in it leads outside the memory it was checked for.  Row by row.
class StepInput {
 public:
  explicit StepInput(const StepLimits& limits);

  // Throws std::invalid_argument saying what is wrong; `arrays` must stay until the step is done.
  void set(const StepArrays& arrays);

  int rows() const { return rows_; }
  int selected_rows() const { return int(selected_.size()); }
  int token(int row) const { return tokens_[row]; }
  int position(int row) const { return positions_[size_t(row)]; }
  int page(int row) const { return pages_[size_t(row)]; }  // that the row's key and value are written to
  int selected(int index) const { return selected_[size_t(index)]; }  // row of the i-th row whose logits are wanted
  const std::vector<Slice>& slices() const { return slices_; }

  // The last row, `row` or one of the few before it, where rows may be divided between threads: a key or value of a page
  // is written together with the slots after it in its vector element (AttentionKernel), so one thread writes them all.
  int boundary(int row) const;

 private:
  void add_slice(const StepArrays& arrays, size_t index);
  Span<int32_t> check_slice(const StepArrays& arrays, size_t index) const;
  void check_tokens(const StepArrays& arrays) const;

  StepLimits limits_;
  int rows_ = 0;
  const int32_t* tokens_ = nullptr;
  std::vector<int> positions_, pages_, slice_starts_;
  std::vector<int> selected_;
  std::vector<Slice> slices_;
};

}  // namespace topg
