#include "sampling/truncation.h"

#include <algorithm>
#include <functional>
#include <limits>

#include "kernels/kernels.h"

namespace topg {
namespace {

constexpr int kFirstRanked = 64;  // tokens that top-p ranks at first; then four times as many, and so on

bool ranks_before(const Candidate& a, const Candidate& b) {
  return a.weight != b.weight ? a.weight > b.weight : a.place < b.place;
}

// Keeps the tokens for which keep(weight, place) holds.
template <class Keep>
void filter(Kept* kept, Keep keep) {
  int count = 0;
  for (int place = 0; place < kept->count; ++place) {
    const double weight = kept->weights[place];
    kept->tokens[count] = kept->tokens[place];
    kept->weights[count] = weight;
    count += keep(weight, place) ? 1 : 0;
  }
  kept->count = count;
}

// The k-th largest of values [count], which are moved around.
double kth_largest(double* values, int count, int k) {
  std::nth_element(values, values + k - 1, values + count, std::greater<double>());
  return values[k - 1];
}

// A number that at least k logits reach: the k-th largest of the runs' maxima.
double bound_of_best(const Logits& logits, int k, double* values) {
  if (k > logits.runs()) return -std::numeric_limits<double>::infinity();
  std::copy_n(logits.maxima, logits.runs(), values);
  return kth_largest(values, logits.runs(), k);
}

// Ids of the logits of at least `bound`, ascending.
int at_least(const Logits& logits, double bound, int32_t* tokens) {
  int count = 0;
  for (int run = 0; run < logits.runs(); ++run) {
    if (logits.maxima[run] < bound) continue;
    const int end = std::min((run + 1) * kSampleRun, logits.count);
    for (int token = run * kSampleRun; token < end; ++token) {
      tokens[count] = token;
      count += logits.values[token] >= bound ? 1 : 0;
    }
  }
  return count;
}

// The last token that top-p keeps; candidates are ranked only as far as it.
Candidate last_in_share(double wanted, Candidate* candidates, int count) {
  Candidate* const end = candidates + count;
  Candidate* next = candidates;
  double sum = 0;
  for (int ranked = kFirstRanked; next != end; ranked *= 4) {
    Candidate* const stop = end - next <= ranked ? end : next + ranked;
    if (stop != end) std::nth_element(next, stop, end, ranks_before);
    std::sort(next, stop, ranks_before);
    for (; next != stop; ++next) {
      sum += next->weight;
      if (sum >= wanted) return *next;
    }
  }
  return end[-1];  // rounding kept the sum below: all stay
}

}  // namespace

int Logits::runs() const { return (count + kSampleRun - 1) / kSampleRun; }

int best_tokens(const Logits& logits, int k, double* values, int32_t* tokens) {
  const int candidates = at_least(logits, bound_of_best(logits, k, values), tokens);
  for (int i = 0; i < candidates; ++i) values[i] = logits.values[tokens[i]];
  const double threshold = kth_largest(values, candidates, k);
  int ties = k - int(std::count_if(values, values + k, [&](double value) { return value > threshold; }));
  int count = 0;
  for (int i = 0; i < candidates; ++i) {
    const double value = logits.values[tokens[i]];
    if (value < threshold || (value == threshold && ties-- <= 0)) continue;
    tokens[count++] = tokens[i];
  }
  return count;
}

void keep_top_p(double p, double total, Candidate* candidates, Kept* kept) {
  // All tokens below this weight together hold less than the share 1 - p, and they come last.  Half of the share leaves room
  // for rounding.
  const double certain_tail = 0.5 * (1 - p) * total / kept->count;
  filter(kept, [&](double weight, int) { return weight >= certain_tail; });
  for (int place = 0; place < kept->count; ++place) candidates[place] = {kept->weights[place], place};
  const Candidate last = last_in_share(p * total, candidates, kept->count);
  filter(kept, [&](double weight, int place) { return !ranks_before(last, {weight, place}); });
}

void keep_min_p(double p, Kept* kept) {
  const double least = p * *std::max_element(kept->weights, kept->weights + kept->count);
  filter(kept, [&](double weight, int) { return weight >= least; });
}

}  // namespace topg
