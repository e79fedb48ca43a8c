// SPDX-License-Identifier: Apache-2.0
// lockstep/batch_totals.h: the size and the mean loss of a global batch; how the batch of one rank counts in it.
//
// Threads: values
// Ranks:   what a strategy returns is the same on every rank
#pragma once

#include <cmath>
#include <cstdint>

namespace lockstep {

struct BatchTotals {
  int64_t samples = 0;   // as they count in the mean (Task::samples)
  double mean_loss = 0;  // weighted by samples; NaN where the loss is not known
  int64_t examples = 0;  // the sizes of the batches; what a strategy returns has them

  // Adds a part of the batch, or one of several batches. more: 0 adds nothing, whatever the loss is.
  void add(int64_t more, double loss) {
    if (more == 0) return;
    const double sum = mean_loss * static_cast<double>(samples) + loss * static_cast<double>(more);
    samples += more;
    mean_loss = sum / static_cast<double>(samples);
  }
};

// How one rank's batch counts in the mean gradient: in one exchange those of all ranks by samples, or all alike.
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
