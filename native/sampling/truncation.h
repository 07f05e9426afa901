// Cutting the distribution's tail: top-k, top-p, min-p.  The rules are those of topg/sampling/truncation.py.
//
// Nothing is sorted that need not be: top-k looks only into runs of logits whose maximum may be among the best, top-p ranks
// tokens only until the wanted share is reached.
#pragma once

#include <cstdint>

namespace topg {

// A vocabulary's logits and the maxima of its runs of kSampleRun.
struct Logits {
  const double* values;
  const double* maxima;
  int count;

  int runs() const;
};

struct Candidate {
  double weight;
  int32_t place;
};

// Tokens that can still be drawn, in ascending order of their ids, with weights.
struct Kept {
  double* weights;
  int32_t* tokens;
  int count;
};

// Ids of the k best, 0 < k < count, ascending: the lower id among equals.  `tokens` [count] receives them, `values` [count] is
// overwritten.  Tokens at -inf may be left out.  Returns how many there are.
int best_tokens(const Logits& logits, int k, double* values, int32_t* tokens);

// Keeps the fewest best tokens whose weights add up to at least `p` of `total`.  candidates [kept.count] is overwritten.
void keep_top_p(double p, double total, Candidate* candidates, Kept* kept);

// Keeps tokens with at least `p` times the best token's weight.
void keep_min_p(double p, Kept* kept);

}  // namespace topg
