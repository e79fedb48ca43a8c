// gradient/batch_totals.h: what all ranks know of a batch once its gradients are exchanged.
//
// Threads: a value
// Ranks:   the same on every rank
#pragma once

#include <cstdint>

namespace lockstep {

struct BatchTotals {
  std::int64_t samples = 0;  // over all ranks
  double mean_loss = 0;      // weighted by samples; NaN where the loss is not known
};

}  // namespace lockstep
