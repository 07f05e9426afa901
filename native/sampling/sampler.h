// From logits to the next token, row by row.
//
// The order is fixed, and every number is a float64 (topg/sampling/sampler.py says the same in Python):
//
//   1. biases and bans       added; banned tokens, those not allowed, and end tokens before `min_tokens`, become -inf
//   2. penalties             repetition (prompt and output, once a token), then presence and frequency (output)
//   3. log-probabilities     log-softmax of what stands now
//   4. temperature           greedy: the best token, the lowest id among equals
//   5. top-k, top-p, min-p   see truncation.h
//   6. draw                  cumulative weights in order of ids; the first that exceeds u * total, u from the seed
//
// A row depends on its own logits and state alone.  Nothing here allocates: each thread brings a scratch made at load.
#pragma once

#include "kernels/kernels.h"
#include "runtime/memory.h"
#include "sampling/sampler_state.h"
#include "sampling/truncation.h"

namespace topg {

enum class SampleError : uint8_t {
  kNone,
  kUnusable,  // the logits hold NaN, +inf, or nothing but -inf
  kNoToken,   // biases and bans leave no token
};

// Valid when `error` is kNone.
struct SampledToken {
  SampleError error;
  int token;
  double logprob;  // of `token`, when log-probabilities were asked for
  int top_count;
  int top_tokens[kMaxLogprobs];  // best first, the lower id first among equals
  double top_logprobs[kMaxLogprobs];
};

// One thread's memory, for rows of up to `vocab` logits.
class SamplerScratch {
 public:
  explicit SamplerScratch(int vocab);
  int vocab() const { return vocab_; }
  size_t size() const { return arena_.size(); }

 private:
  friend class RowSampler;
  void lay_out();

  int vocab_;
  Arena arena_;
  double* logits_ = nullptr;         // [vocab], adjusted
  double* weights_ = nullptr;        // [vocab]: of all tokens, or of those that top-k left
  double* maxima_ = nullptr;         // of the logits' runs
  double* weight_maxima_ = nullptr;  // of the weights' runs
  double* sums_ = nullptr;           // of weights, up to the end of each run
  Candidate* ranked_ = nullptr;      // [vocab]
  int32_t* tokens_ = nullptr;        // [vocab]: ids that top-k left
  int32_t* places_ = nullptr;        // [vocab]: of the weights that top-p and min-p left
};

// The next token of one row: logits [state.vocab()].
void sample_row(const Kernels& kernels, const float* logits, const SamplerState& state, const SamplerScratch& scratch,
                SampledToken* out);

// Rows of a step, each with its request's state.
struct SampleRows {
  const float* logits;  // row i at logits + i * stride
  ptrdiff_t stride;
  const SamplerState* const* states;
  SampledToken* out;
};

// Rows [begin, end): one thread's share of a step.
inline void sample_rows(const Kernels& kernels, const SampleRows& rows, int begin, int end,
                        const SamplerScratch& scratch) {
  for (int row = begin; row < end; ++row) {
    sample_row(kernels, rows.logits + row * rows.stride, *rows.states[row], scratch, &rows.out[row]);
  }
}

}  // namespace topg
