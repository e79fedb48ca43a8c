// train/evaluate.h: loss and accuracy over a validation set, which the ranks share.
//
// Ranks:   every rank calls it; each computes its part, and all get the same exact result
#pragma once

#include <cstdint>
#include <memory>

#include "lockstep/loader.h"
#include "lockstep/strategy.h"
#include "lockstep/task.h"
#include "lockstep/world.h"

namespace lockstep {

struct Evaluation {
  double loss = 0;      // mean over all samples
  double accuracy = 0;  // share of samples that are right, as task.correct counts them; NaN without it
  std::int64_t samples = 0;
};

// In evaluation mode and without gradients, in order, in batches of options.batch_size per rank. Each sample counts
// once, whatever the number of ranks. Blocks; sends 24 bytes. S0.
Evaluation evaluate(const World& world, const Task& task, Strategy& strategy,
                    const std::shared_ptr<const Dataset>& dataset, const LoaderOptions& options);

}  // namespace lockstep
