// SPDX-License-Identifier: Apache-2.0
// train/evaluate.h: loss and accuracy over a validation set.
//
// Flow:    the validation set -> Strategy::forward -> Task::loss and Task::correct -> sums over all ranks
// Threads: one thread
// Ranks:   every rank calls it and computes its part; all get the same exact result
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

// Runs the model in evaluation mode, without gradients, over the samples in order, in batches of options.batch_size per
// rank. Each sample counts once, whatever the number of ranks. Blocks; sends 24 bytes.
Evaluation evaluate(const World& world, const Task& task, Strategy& strategy,
                    const std::shared_ptr<const Dataset>& dataset, LoaderOptions options);

}  // namespace lockstep
