// What sampling remembers of one request: its settings, and which tokens occurred.  Made once a request; a step only reads.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace topg {

constexpr int kMaxLogprobs = 20;

struct TokenBias {
  int token;
  double bias;
};

// Settings of a request, as topg.SamplingParams explains them.
struct SamplingSettings {
  bool greedy = false;
  double temperature = 1;
  int top_k = 0;  // below 1, or at least the vocabulary: all
  double top_p = 1;
  double min_p = 0;
  double repetition_penalty = 1;
  double presence_penalty = 0;
  double frequency_penalty = 0;
  uint64_t seed = 0;
  int min_tokens = 0;
  int logprobs = -1;  // best alternatives to report; -1: no log-probabilities at all
  std::vector<TokenBias> biases;
  std::vector<int> banned;
  std::vector<int> exclusive;   // when there are any, nothing else can be drawn; ascending, each once
  std::vector<int> end_tokens;  // banned until min_tokens were generated
};

class SamplerState {
 public:
  // Throws std::invalid_argument when a token id lies outside the vocabulary or a setting outside its range.
  SamplerState(SamplingSettings settings, int vocab, const int32_t* prompt, size_t prompt_count);
  SamplerState(const SamplerState&) = delete;
  SamplerState& operator=(const SamplerState&) = delete;

  // Note that `token` was generated.  Throws std::invalid_argument for an id outside the vocabulary.
  void record(int token);
  // From now on only tokens whose bit is set can be drawn: token t has bit t % 32 of word t / 32, (vocab + 31) / 32 words.
  // Null: every token again.
  void allow(const uint32_t* words);

  const SamplingSettings& settings() const { return settings_; }
  int vocab() const { return vocab_; }
  int generated() const { return generated_; }

  // Whether biases, bans, the allowed tokens or penalties change the next token's logits.
  bool adjusts() const;
  // Whether the best logit as it stands is the next token: no logits need to be kept for this row.
  bool takes_best() const { return settings_.greedy && settings_.logprobs < 0 && !adjusts(); }
  // Biases, bans and penalties, in place: logits [vocab].
  void adjust(double* logits) const;

 private:
  bool bans_end_tokens() const { return generated_ < settings_.min_tokens && !settings_.end_tokens.empty(); }
  void check() const;
  void check_token(int token) const;
  void note_seen(int token);
  void keep_allowed(double* logits) const;
  void keep_exclusive(double* logits) const;
  void penalise(double* logits) const;

  const SamplingSettings settings_;
  const int vocab_;
  int generated_ = 0;
  std::vector<bool> is_seen_;  // of prompt and output; empty when nothing needs it
  std::vector<int> seen_;      // the ids, each once
  std::vector<int> output_counts_;  // by id; empty when nothing needs them
  std::vector<int> output_;         // ids with a count, each once
  std::vector<uint32_t> allowed_;   // empty: all
};

}  // namespace topg
