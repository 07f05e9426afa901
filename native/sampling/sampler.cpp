#include "sampling/sampler.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "sampling/random_numbers.h"

namespace topg {
namespace {

// Sums up to the end of each run of weights, added one after the other.
void add_up(const double* weights, int count, double* sums) {
  double sum = 0;
  for (int i = 0; i < count; ++i) {
    sum += weights[i];
    sums[i / kSampleRun] = sum;
  }
}

// The first place whose cumulative weight exceeds u times the total.
int place_of(double u, const double* weights, const double* sums, int count) {
  const int runs = (count + kSampleRun - 1) / kSampleRun;
  const double target = u * sums[runs - 1];
  const int run = int(std::upper_bound(sums, sums + runs, target) - sums);
  double sum = run == 0 ? 0 : sums[run - 1];
  int place = run * kSampleRun;
  while ((sum += weights[place]) <= target) ++place;
  return place;
}

}  // namespace

SamplerScratch::SamplerScratch(int vocab) : vocab_(vocab) {
  lay_out();
  arena_.commit();
  lay_out();
}

void SamplerScratch::lay_out() {
  const size_t count = size_t(vocab_), runs = (count + kSampleRun - 1) / kSampleRun;
  logits_ = arena_.take<double>(count);
  weights_ = arena_.take<double>(count);
  maxima_ = arena_.take<double>(runs);
  weight_maxima_ = arena_.take<double>(runs);
  sums_ = arena_.take<double>(runs);
  ranked_ = arena_.take<Candidate>(count);
  tokens_ = arena_.take<int32_t>(count);
  places_ = arena_.take<int32_t>(count);
}

// One row on its way through the steps that sampler.h lists.
class RowSampler {
 public:
  RowSampler(const Kernels& kernels, const SamplerState& state, const SamplerScratch& scratch)
      : kernels_(kernels), state_(state), settings_(state.settings()), scratch_(scratch), vocab_(state.vocab()) {}

  SampleError adjust(const float* logits);
  int token() const { return settings_.greedy ? best() : draw(); }
  void report_logprobs(SampledToken* out) const;

 private:
  Runs logits() const { return {scratch_.logits_, scratch_.maxima_, vocab_}; }
  bool cuts_top_k() const { return settings_.top_k > 0 && settings_.top_k < vocab_; }
  bool cuts_weights() const { return settings_.top_p < 1 || settings_.min_p > 0; }
  int best() const;
  int draw() const;
  int take_top_k() const;
  int cut_weights(int count) const;
  void weigh(const double* values, int count, double temperature) const;
  int ranked_best(int count, int32_t* tokens) const;

  const Kernels& kernels_;
  const SamplerState& state_;
  const SamplingSettings& settings_;
  const SamplerScratch& scratch_;
  const int vocab_;
  double maximum_ = 0;
};

SampleError RowSampler::adjust(const float* logits) {
  kernels_.sampling.widen(logits, vocab_, scratch_.logits_);
  if (state_.adjusts()) state_.adjust(scratch_.logits_);
  kernels_.sampling.run_maxima(scratch_.logits_, vocab_, scratch_.maxima_);
  maximum_ = *std::max_element(scratch_.maxima_, scratch_.maxima_ + this->logits().runs());
  return std::isinf(maximum_) ? SampleError::kNoToken : SampleError::kNone;
}

int RowSampler::best() const {
  const double* run = std::find(scratch_.maxima_, scratch_.maxima_ + logits().runs(), maximum_);
  const double* token = scratch_.logits_ + (run - scratch_.maxima_) * kSampleRun;
  while (*token != maximum_) ++token;
  return int(token - scratch_.logits_);
}

// weights and sums of values [count].
void RowSampler::weigh(const double* values, int count, double temperature) const {
  kernels_.sampling.weights(values, count, maximum_, temperature, scratch_.weights_, scratch_.sums_);
}

// The best tokens' ids into tokens, their logits into weights; returns how many there are.
int RowSampler::take_top_k() const {
  const int count = largest(logits(), settings_.top_k, scratch_.weights_, scratch_.tokens_);
  for (int i = 0; i < count; ++i) scratch_.weights_[i] = scratch_.logits_[scratch_.tokens_[i]];
  return count;
}

// top-p and min-p: moves the weights that stay to the front and their places into places; returns how many there are.
int RowSampler::cut_weights(int count) const {
  double* weights = scratch_.weights_;
  kernels_.sampling.run_maxima(weights, count, scratch_.weight_maxima_);
  const Runs runs{weights, scratch_.weight_maxima_, count};
  Candidate last{settings_.min_p, count};  // the best token's weight is 1
  if (settings_.top_p < 1) {
    const double total = scratch_.sums_[runs.runs() - 1];
    last = std::min(last, last_in_share(runs, settings_.top_p, total, scratch_.ranked_), ranks_before);
  }
  const int kept = up_to(runs, last, scratch_.places_);
  for (int i = 0; i < kept; ++i) weights[i] = weights[scratch_.places_[i]];
  add_up(weights, kept, scratch_.sums_);
  return kept;
}

int RowSampler::draw() const {
  int count = cuts_top_k() ? take_top_k() : vocab_;
  weigh(cuts_top_k() ? scratch_.weights_ : scratch_.logits_, count, settings_.temperature);
  if (cuts_weights()) count = cut_weights(count);
  const double u = uniform(settings_.seed, uint64_t(state_.generated()));
  int place = place_of(u, scratch_.weights_, scratch_.sums_, count);
  if (cuts_weights()) place = scratch_.places_[place];
  return cuts_top_k() ? scratch_.tokens_[place] : place;
}

void RowSampler::report_logprobs(SampledToken* out) const {
  weigh(scratch_.logits_, vocab_, 1);
  const double log_total = std::log(scratch_.sums_[logits().runs() - 1]);
  const auto logprob = [&](int token) { return scratch_.logits_[token] - maximum_ - log_total; };
  out->logprob = logprob(out->token);
  out->top_count = ranked_best(settings_.logprobs, out->top_tokens);
  for (int i = 0; i < out->top_count; ++i) out->top_logprobs[i] = logprob(out->top_tokens[i]);
}

// The best tokens above -inf, best first, the lower id first among equals.
int RowSampler::ranked_best(int wanted, int32_t* tokens) const {
  if (wanted == 0) return 0;
  int32_t* best = scratch_.tokens_;
  int count = vocab_;
  if (wanted < vocab_) {
    count = largest(logits(), wanted, scratch_.weights_, best);
  } else {
    std::iota(best, best + count, 0);
  }
  const double* values = scratch_.logits_;
  std::sort(best, best + count, [&](int a, int b) { return values[a] != values[b] ? values[a] > values[b] : a < b; });
  while (std::isinf(values[best[count - 1]])) --count;
  std::copy_n(best, count, tokens);
  return count;
}

void sample_row(const Kernels& kernels, const float* logits, const SamplerState& state, const SamplerScratch& scratch,
                SampledToken* out) {
  *out = {};
  const int best = kernels.rows.argmax(logits, state.vocab());
  if (best < 0) {
    out->error = SampleError::kUnusable;
  } else if (state.takes_best()) {
    out->token = best;
  } else {
    RowSampler row(kernels, state, scratch);
    out->error = row.adjust(logits);
    if (out->error != SampleError::kNone) return;
    out->token = row.token();
    if (state.settings().logprobs >= 0) row.report_logprobs(out);
  }
}

}  // namespace topg
