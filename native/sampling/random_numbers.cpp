#include "sampling/random_numbers.h"

namespace topg {
namespace {

constexpr int kRounds = 10;
constexpr PhiloxKey kMultipliers = {0xD2E7470EE14C6C93, 0xCA5A826395121157};
constexpr PhiloxKey kKeySteps = {0x9E3779B97F4A7C15, 0xBB67AE8584CAA73B};

__extension__ typedef unsigned __int128 DoubleWord;

}  // namespace

PhiloxCounter philox4x64(PhiloxKey key, PhiloxCounter counter) {
  for (int round = 0; round < kRounds; ++round) {
    const DoubleWord left = DoubleWord(kMultipliers[0]) * counter[0];
    const DoubleWord right = DoubleWord(kMultipliers[1]) * counter[2];
    counter = {uint64_t(right >> 64) ^ counter[1] ^ key[0], uint64_t(right),
               uint64_t(left >> 64) ^ counter[3] ^ key[1], uint64_t(left)};
    for (std::size_t i = 0; i < key.size(); ++i) key[i] += kKeySteps[i];
  }
  return counter;
}

double uniform(uint64_t seed, uint64_t index) {
  const uint64_t word = philox4x64({seed, 0}, {index, 0, 0, 0})[0];
  return double(word >> 11) * 0x1p-53;
}

}  // namespace topg
