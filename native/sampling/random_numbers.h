// Counter-based random numbers: a request's n-th draw depends on its seed and n, and on nothing else.
//
// Philox4x64-10 (Salmon, Moraes, Dror, Shaw: "Parallel random numbers: as easy as 1, 2, 3", SC 2011); the same numbers as
// topg/sampling/random_numbers.py.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace topg {

using PhiloxCounter = std::array<uint64_t, 4>;
using PhiloxKey = std::array<uint64_t, 2>;

// Four random words for a key and a counter, lowest word first.
PhiloxCounter philox4x64(PhiloxKey key, PhiloxCounter counter);

// The number in [0, 1) that decides output token `index` of a request with this seed.
double uniform(uint64_t seed, uint64_t index);

}  // namespace topg
