#include "engine/step_input.h"

#include <algorithm>
#include <stdexcept>
#include <string>

namespace topg {
namespace {

constexpr int kElementTokens = 4;  // tokens that share a vector element of a page, at most

[[noreturn]] void refuse(const std::string& message) { throw std::invalid_argument(message); }

std::string number(long value) { return std::to_string(value); }

}  // namespace

StepInput::StepInput(const StepLimits& limits) : limits_(limits) {
  const size_t rows = size_t(limits.max_rows);
  positions_.resize(rows);
  pages_.resize(rows);
  slice_starts_.resize(rows);
  selected_.reserve(size_t(limits.max_logits_rows));
  slices_.reserve(rows);
}

void StepInput::set(const StepArrays& arrays) {
  const size_t slices = arrays.counts.size;
  if (slices == 0) refuse("the step has no slices; a step computes at least one token");
  if (arrays.starts.size != slices || arrays.wanted.size != slices || arrays.page_offsets.size != slices + 1) {
    refuse("a step of " + number(long(slices)) +
           " slices needs as many starts and wanted, and one page offset more; given: " +
           number(long(arrays.starts.size)) + ", " + number(long(arrays.wanted.size)) + " and " +
           number(long(arrays.page_offsets.size)));
  }
  if (arrays.tokens.size > size_t(limits_.max_rows)) {
    refuse("the step has " + number(long(arrays.tokens.size)) + " tokens; at most " + number(limits_.max_rows) +
           " are computed in one");
  }
  check_tokens(arrays);
  rows_ = 0;
  tokens_ = arrays.tokens.data;
  slices_.clear();
  selected_.clear();
  for (size_t i = 0; i < slices; ++i) add_slice(arrays, i);
  if (size_t(rows_) != arrays.tokens.size) {
    refuse("the slices have " + number(rows_) + " tokens together; " + number(long(arrays.tokens.size)) + " were given");
  }
}

void StepInput::check_tokens(const StepArrays& arrays) const {
  for (size_t i = 0; i < arrays.tokens.size; ++i) {
    const int32_t token = arrays.tokens.data[i];
    if (token < 0 || token >= limits_.vocab) {
      refuse("token id " + number(token) + " does not exist; the model has ids 0 to " + number(limits_.vocab - 1));
    }
  }
}

// Slice `index`, whose tokens begin at row rows_, with its page table.
Span<int32_t> StepInput::check_slice(const StepArrays& arrays, size_t index) const {
  const int start = arrays.starts.data[index], count = arrays.counts.data[index];
  const std::string slice = "slice " + number(long(index));
  const long left = long(arrays.tokens.size) - rows_;
  if (count < 1 || count > left) {
    refuse(slice + " has " + number(count) + " tokens; allowed: 1 to the " + number(left) + " that are left");
  }
  if (start < 0 || start > limits_.positions - count) {
    refuse(slice + " needs positions " + number(start) + " to " + number(long(start) + count - 1) +
           "; there are positions 0 to " + number(limits_.positions - 1));
  }
  const int first = arrays.page_offsets.data[index], last = arrays.page_offsets.data[index + 1];
  if (first < 0 || last < first || size_t(last) > arrays.pages.size) {
    refuse(slice + " has pages " + number(first) + " to " + number(last) + " of " + number(long(arrays.pages.size)) +
           "; offsets must ascend within them");
  }
  const Span<int32_t> table = {arrays.pages.data + first, size_t(last - first)};
  const long room = long(table.size) * limits_.tokens_per_page, needed = long(start) + count;
  if (room < needed) {
    refuse(slice + " has a page table of " + number(long(table.size)) + " pages, which has room for " + number(room) +
           " of " + number(needed) + " tokens");
  }
  for (size_t i = 0; i < table.size; ++i) {
    if (table.data[i] >= 0 && table.data[i] < limits_.pages) continue;
    refuse(slice + " names page " + number(table.data[i]) + "; the pool has pages 0 to " + number(limits_.pages - 1));
  }
  if (arrays.wanted.data[index] > uint8_t(LogitsWanted::kAll)) {
    refuse(slice + " wants logits " + number(arrays.wanted.data[index]) + "; allowed: 0 (none), 1 (last) and 2 (all)");
  }
  return table;
}

void StepInput::add_slice(const StepArrays& arrays, size_t index) {
  const int32_t* pages = check_slice(arrays, index).data;
  const int start = arrays.starts.data[index], count = arrays.counts.data[index];
  slices_.push_back({rows_, count, start, pages});
  for (int i = 0; i < count; ++i) {
    const size_t row = size_t(rows_ + i);
    positions_[row] = start + i;
    pages_[row] = pages[(start + i) / limits_.tokens_per_page];
    slice_starts_[row] = rows_;
  }
  const auto wanted = LogitsWanted(arrays.wanted.data[index]);
  const int selected = wanted == LogitsWanted::kAll ? count : wanted == LogitsWanted::kLast ? 1 : 0;
  if (int(selected_.size()) + selected > limits_.max_logits_rows) {
    refuse("the step wants logits of more than " + number(limits_.max_logits_rows) +
           " rows, which is the most of one step");
  }
  for (int i = count - selected; i < count; ++i) selected_.push_back(rows_ + i);
  rows_ += count;
}

int StepInput::boundary(int row) const {
  if (row >= rows_) return rows_;
  return std::max(slice_starts_[size_t(row)], row - positions_[size_t(row)] % kElementTokens);
}

}  // namespace topg
