// Cutting the distribution's tail: top-k, top-p, min-p.  The rules are those of topg/sampling/truncation.py.
//
// Nothing is looked at or sorted that need not be: runs of numbers whose maximum is too small are passed over, and top-p ranks
// tokens only until the wanted share is reached.
#pragma once

#include <cstdint>

namespace topg {

// Numbers with the maxima of their runs of kSampleRun.
struct Runs {
  const double* values;
  const double* maxima;
  int count;

  int runs() const;
};

// A weight and where it stands.  Equal weights rank by place, the first one first.
struct Candidate {
  double weight;
  int32_t place;
};

inline bool ranks_before(const Candidate& a, const Candidate& b) {
  return a.weight != b.weight ? a.weight > b.weight : a.place < b.place;
}

// Places of the k largest, 0 < k < count, ascending; the first among equals.  `places` [count] receives them, `moved` [count]
// is overwritten.  Returns k.
int largest(const Runs& numbers, int k, double* moved, int32_t* places);

// top-p: the last of the fewest best weights that add up to at least `p` of `total`.  `ranked` [count] is overwritten.
Candidate last_in_share(const Runs& weights, double p, double total, Candidate* ranked);

// Places of the weights that do not rank after `last`, ascending; returns how many.
int up_to(const Runs& weights, const Candidate& last, int32_t* places);

}  // namespace topg
