#include "sampling/truncation.h"

#include <algorithm>
#include <cstddef>
#include <functional>
#include <limits>

#include "kernels/kernels.h"

namespace topg {
namespace {

constexpr ptrdiff_t kFirstRanked = 64;      // weights that are ranked at first; then four times as many, and so on
constexpr double kThresholdStep = 1. / 64;  // from one threshold of top-p to the next

// function(place) for each number of at least `least`, in ascending order.
template <class Function>
void for_each_from(const Runs& numbers, double least, Function function) {
  for (int run = 0; run < numbers.runs(); ++run) {
    if (numbers.maxima[run] < least) continue;
    const int end = std::min((run + 1) * kSampleRun, numbers.count);
    for (int place = run * kSampleRun; place < end; ++place) {
      if (numbers.values[place] >= least) function(place);
    }
  }
}

// The k-th largest of values [count], which are moved around.
double kth_largest(double* values, int count, int k) {
  std::nth_element(values, values + k - 1, values + count, std::greater<double>());
  return values[k - 1];
}

// A bound that at least k numbers reach: the k-th largest of the runs' maxima.
double bound_of_largest(const Runs& numbers, int k, double* moved) {
  if (k > numbers.runs()) return -std::numeric_limits<double>::infinity();
  std::copy_n(numbers.maxima, numbers.runs(), moved);
  return kth_largest(moved, numbers.runs(), k);
}

// The candidate with which the sum in order of rank reaches `wanted`, or null; ranks no more of [next, end) than it must.
const Candidate* where_reached(double wanted, Candidate* next, Candidate* end) {
  double sum = 0;
  for (ptrdiff_t count = kFirstRanked; next != end; count *= 4) {
    Candidate* const stop = next + std::min(count, end - next);
    if (stop != end) std::nth_element(next, stop, end, ranks_before);
    std::sort(next, stop, ranks_before);
    for (; next != stop; ++next) {
      sum += next->weight;
      if (sum >= wanted) return next;
    }
  }
  return nullptr;
}

}  // namespace

int Runs::runs() const { return (count + kSampleRun - 1) / kSampleRun; }

int largest(const Runs& numbers, int k, double* moved, int32_t* places) {
  int candidates = 0;
  for_each_from(numbers, bound_of_largest(numbers, k, moved), [&](int place) { places[candidates++] = place; });
  for (int i = 0; i < candidates; ++i) moved[i] = numbers.values[places[i]];
  const double threshold = kth_largest(moved, candidates, k);
  int ties = k - int(std::count_if(moved, moved + k, [&](double value) { return value > threshold; }));
  int count = 0;
  for (int i = 0; i < candidates; ++i) {
    const double value = numbers.values[places[i]];
    if (value < threshold || (value == threshold && ties-- <= 0)) continue;
    places[count++] = places[i];
  }
  return count;
}

// Tries ever lower thresholds: the weights above one are the first by rank, whatever the others are.
Candidate last_in_share(const Runs& weights, double p, double total, Candidate* ranked) {
  // All weights below it together hold less than the share 1 - p, and they come last.  Half of the share leaves room for
  // rounding.
  const double certain_tail = 0.5 * (1 - p) * total / weights.count;
  const double wanted = p * total, surely_less = wanted * (1 - 1e-6);
  for (double least = kThresholdStep;; least *= kThresholdStep) {
    least = std::max(least, certain_tail);
    Candidate* end = ranked;
    double sum = 0;
    for_each_from(weights, least, [&](int place) {
      *end++ = {weights.values[place], place};
      sum += weights.values[place];
    });
    const bool is_last = least <= certain_tail;
    if (sum < surely_less && !is_last) continue;
    const Candidate* last = where_reached(wanted, ranked, end);
    if (last != nullptr) return *last;
    if (is_last) return {certain_tail, weights.count};  // rounding kept the sum below: all of them stay
  }
}

int up_to(const Runs& weights, const Candidate& last, int32_t* places) {
  int count = 0;
  for_each_from(weights, last.weight, [&](int place) {
    if (!ranks_before(last, {weights.values[place], place})) places[count++] = place;
  });
  return count;
}

}  // namespace topg
