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
    refuse("a step of " + number(long(slices)) + " slices needs as many starts and wanted, and one page offset more; given: " +
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

void StepInput::add_slice(const StepArrays& arrays, size_t index) {
  const int start = arrays.starts.data[index], count = arrays.counts.data[index];
  const std::string slice = "slice " + number(long(index));
  if (count < 1 || size_t(count) > arrays.tokens.size - size_t(rows_)) {
    refuse(slice + " has " + number(count) + " tokens; allowed: 1 to the " +
           number(long(arrays.tokens.size) - rows_) + " that are left");
  }
  if (start < 0 || start > limits_.positions - count) {
    refuse(slice + " needs positions " + number(start) + " to " + number(long(start) + count - 1) +
           "; there are positions 0 to " + number(limits_.positions - 1));
  }
  const int first_page = arrays.page_offsets.data[index], last_page = arrays.page_offsets.data[index + 1];
  if (first_page < 0 || last_page < first_page || size_t(last_page) > arrays.pages.size) {
    refuse(slice + " has pages " + number(first_page) + " to " + number(last_page) + " of " +
           number(long(arrays.pages.size)) + "; offsets must ascend within them");
  }
  const int per_page = limits_.tokens_per_page, table = last_page - first_page;
  if (long(table) * per_page < long(start) + count) {
    refuse(slice + " has a page table of " + number(table) + " pages, which has room for " +
           number(long(table) * per_page) + " of " + number(long(start) + count) + " tokens");
  }
  const int32_t* pages = arrays.pages.data + first_page;
  for (int i = 0; i < table; ++i) {
    if (pages[i] < 0 || pages[i] >= limits_.pages) {
      refuse(slice + " names page " + number(pages[i]) + "; the pool has pages 0 to " + number(limits_.pages - 1));
    }
  }
  const uint8_t wanted = arrays.wanted.data[index];
  if (wanted > uint8_t(LogitsWanted::kAll)) {
    refuse(slice + " wants logits " + number(wanted) + "; allowed: 0 (none), 1 (last) and 2 (all)");
  }
  slices_.push_back({rows_, count, start, pages});
  for (int i = 0; i < count; ++i) {
    const size_t row = size_t(rows_ + i);
    positions_[row] = start + i;
    pages_[row] = pages[(start + i) / per_page];
    slice_starts_[row] = rows_;
  }
  const LogitsWanted logits = LogitsWanted(wanted);
  const int selected = logits == LogitsWanted::kAll ? count : logits == LogitsWanted::kLast ? 1 : 0;
  if (int(selected_.size()) + selected > limits_.max_logits_rows) {
    refuse("the step wants logits of more than " + number(limits_.max_logits_rows) + " rows, which is the most of one step");
  }
  for (int i = count - selected; i < count; ++i) selected_.push_back(rows_ + i);
  rows_ += count;
}

int StepInput::boundary(int row) const {
  if (row >= rows_) return rows_;
  return std::max(slice_starts_[size_t(row)], row - positions_[size_t(row)] % kElementTokens);
}

}  // namespace topg
