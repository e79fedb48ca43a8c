// SPDX-License-Identifier: Apache-2.0
// lockstep/batch_weight.h: how one rank's batch counts in the mean gradient over all ranks.
//
// Threads: a value
// Ranks:   in one exchange the batches of all ranks count by samples, or all alike
#pragma once

#include <cmath>
#include <cstdint>

namespace lockstep {

struct BatchWeight {
  // Bits: what a rank has accumulated may have several.
  enum Kind : uint8_t {
    kNone = 0,     // no batch
    kSamples = 1,  // by its number of samples
    kAlike = 2,    // each rank once, as in PyTorch: the sum of all .grad is divided by the number of ranks
    kJoined = 4    // no batch; where ranks count alike, it is among the ranks that the sum is divided by
  };
  BatchWeight(int64_t number) : samples(number), kind(kSamples) {}
  BatchWeight(Kind how, double dimension_0 = NAN) : samples(how == kAlike ? 1 : 0), kind(how), size(dimension_0) {}

  int64_t samples;
  Kind kind;
  double size = NAN;  // in examples, for reports; with kAlike also compared for a warning. NaN: not known
};

}  // namespace lockstep
