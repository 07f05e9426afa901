#include "sampling/sampler_state.h"

#include <cmath>
#include <limits>
#include <stdexcept>
#include <string>
#include <utility>

namespace topg {
namespace {

constexpr double kOut = -std::numeric_limits<double>::infinity();
// Penalties and biases within it keep every sum finite, so that no logit becomes infinity minus infinity.
constexpr double kMostAdjusted = 1e30;

void check_range(const char* name, double value, double low, double high) {
  if (value >= low && value <= high) return;  // NaN is in no range
  throw std::invalid_argument(std::string(name) + " is " + std::to_string(value) + "; allowed: " + std::to_string(low) +
                              " to " + std::to_string(high));
}

int checked_vocabulary(int vocab) {
  if (vocab > 0) return vocab;
  throw std::invalid_argument("the vocabulary has " + std::to_string(vocab) + " tokens; allowed: at least 1");
}

}  // namespace

SamplerState::SamplerState(SamplingSettings settings, int vocab, const int32_t* prompt, size_t prompt_count)
    : settings_(std::move(settings)), vocab_(checked_vocabulary(vocab)) {
  check();
  if (settings_.repetition_penalty != 1) {
    is_seen_.resize(size_t(vocab_));
    for (size_t i = 0; i < prompt_count; ++i) {
      check_token(prompt[i]);
      note_seen(prompt[i]);
    }
  }
  if (settings_.presence_penalty != 0 || settings_.frequency_penalty != 0) output_counts_.resize(size_t(vocab_));
}

void SamplerState::check() const {
  constexpr double kLargest = std::numeric_limits<double>::max(), kSmallest = std::numeric_limits<double>::min();
  if (!settings_.greedy) check_range("temperature", settings_.temperature, kSmallest, kLargest);
  check_range("top_p", settings_.top_p, 0, 1);
  check_range("min_p", settings_.min_p, 0, 1);
  check_range("repetition_penalty", settings_.repetition_penalty, 1 / kMostAdjusted, kMostAdjusted);
  check_range("presence_penalty", settings_.presence_penalty, -kMostAdjusted, kMostAdjusted);
  check_range("frequency_penalty", settings_.frequency_penalty, -kMostAdjusted, kMostAdjusted);
  check_range("logprobs", settings_.logprobs, -1, kMaxLogprobs);
  for (const TokenBias& bias : settings_.biases) {
    check_token(bias.token);
    check_range("a bias", bias.bias, -kMostAdjusted, kMostAdjusted);
  }
  for (const auto* tokens : {&settings_.banned, &settings_.exclusive, &settings_.end_tokens}) {
    for (int token : *tokens) check_token(token);
  }
}

void SamplerState::check_token(int token) const {
  if (token >= 0 && token < vocab_) return;
  throw std::invalid_argument("token id " + std::to_string(token) + " is outside the vocabulary; allowed: 0 to " +
                              std::to_string(vocab_ - 1));
}

void SamplerState::record(int token) {
  check_token(token);
  ++generated_;
  if (!is_seen_.empty()) note_seen(token);
  if (!output_counts_.empty() && output_counts_[size_t(token)]++ == 0) output_.push_back(token);
}

void SamplerState::note_seen(int token) {
  if (is_seen_[size_t(token)]) return;
  is_seen_[size_t(token)] = true;
  seen_.push_back(token);
}

void SamplerState::allow(const uint32_t* words) {
  if (words == nullptr) {
    allowed_.clear();
  } else {
    allowed_.assign(words, words + (vocab_ + 31) / 32);
  }
}

bool SamplerState::adjusts() const {
  return !settings_.biases.empty() || !settings_.banned.empty() || !settings_.exclusive.empty() || bans_end_tokens() ||
         !allowed_.empty() || !is_seen_.empty() || !output_counts_.empty();
}

void SamplerState::adjust(double* logits) const {
  for (const TokenBias& bias : settings_.biases) logits[bias.token] += bias.bias;
  if (!settings_.exclusive.empty()) keep_exclusive(logits);
  if (!allowed_.empty()) keep_allowed(logits);
  for (int token : settings_.banned) logits[token] = kOut;
  if (bans_end_tokens()) {
    for (int token : settings_.end_tokens) logits[token] = kOut;
  }
  penalise(logits);
}

// Moves along the sorted exclusive tokens and clears what lies between them.
void SamplerState::keep_exclusive(double* logits) const {
  size_t next = 0;
  for (int token = 0; token < vocab_; ++token) {
    if (next < settings_.exclusive.size() && settings_.exclusive[next] == token) {
      ++next;
    } else {
      logits[token] = kOut;
    }
  }
}

void SamplerState::keep_allowed(double* logits) const {
  for (int token = 0; token < vocab_; ++token) {
    if ((allowed_[size_t(token) / 32] >> (token % 32) & 1) == 0) logits[token] = kOut;
  }
}

void SamplerState::penalise(double* logits) const {
  for (int token : seen_) {
    double& logit = logits[token];
    logit = logit > 0 ? logit / settings_.repetition_penalty : logit * settings_.repetition_penalty;
  }
  for (int token : output_) {
    logits[token] -= settings_.presence_penalty + settings_.frequency_penalty * output_counts_[size_t(token)];
  }
}

}  // namespace topg
