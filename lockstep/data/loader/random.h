// SPDX-License-Identifier: Apache-2.0
// data/loader/random.h: random numbers that are a function of (seed, epoch, sample), so that a sample's augmentation is
// the same for any number of ranks and workers, and after any interruption.
//
// Source:  Philox 4x32-10 (Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011), from
//          ATen; SplitMix64 (Steele, Lea and Flood, 2014)
// Threads: values
#pragma once

#include <ATen/core/PhiloxRNGEngine.h>

#include <bit>
#include <cstdint>
#include <limits>

namespace lockstep {

// Gives neighbouring epochs and seeds unrelated numbers.
inline uint64_t mix_seed(uint64_t seed, int64_t epoch) {
  uint64_t z = seed + (static_cast<uint64_t>(epoch) + 1) * 0x9E3779B97F4A7C15ULL;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ULL;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBULL;
  return z ^ (z >> 31);
}

// The random numbers of one sample. A std::uniform_random_bit_generator.
class SampleRandom {
 public:
  SampleRandom(uint64_t epoch_seed, int64_t index) : engine_(epoch_seed, static_cast<uint64_t>(index)) {}

  using result_type = uint32_t;
  static constexpr result_type min() { return 0; }
  static constexpr result_type max() { return std::numeric_limits<result_type>::max(); }
  result_type operator()() { return engine_(); }

  double uniform() {  // in [0, 1)
    const uint64_t high = engine_() >> 5;
    const uint64_t low = engine_() >> 6;
    return static_cast<double>((high << 26) | low) * 0x1p-53;
  }
  double uniform(double low, double high) { return low + (high - low) * uniform(); }
  int64_t below(int64_t bound) { return static_cast<int64_t>(uniform() * static_cast<double>(bound)); }
  bool coin() { return (engine_() & 1) != 0; }

 private:
  at::Philox4_32 engine_;
};

// The place of `position` in the random permutation of [0, count) that `key` chooses, without a table (Black and Rogaway,
// "Ciphers with arbitrary finite domains", 2002). A Feistel network permutes [0, P), P the next power of four: each
// round mixes one half of the bits into the other, which can be undone, so it is one to one. Where it lands at or above
// `count` it is applied again. Following a permutation's cycle from a start below `count` comes back there at the
// latest, so the loop ends, and different positions end differently. P < 4 count: less than 4 rounds of it on average.
inline uint64_t permuted(uint64_t position, uint64_t count, uint64_t key) {
  constexpr int kRounds = 6;
  const int half = (std::bit_width(count - 1) + 1) / 2;
  const uint64_t mask = (uint64_t{1} << half) - 1;
  do {
    uint64_t left = position >> half;
    uint64_t right = position & mask;
    for (int round = 0; round < kRounds; ++round) {
      const uint64_t next = left ^ (mix_seed(key + right, round) & mask);
      left = right;
      right = next;
    }
    position = (left << half) | right;
  } while (position >= count);
  return position;
}

}  // namespace lockstep
