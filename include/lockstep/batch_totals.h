// SPDX-License-Identifier: Apache-2.0
// lockstep/batch_totals.h: the size and the mean loss of a global batch.
//
// Threads: a value
// Ranks:   what a strategy returns is the same on every rank
#pragma once

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

}  // namespace lockstep
