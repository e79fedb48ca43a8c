// SPDX-License-Identifier: Apache-2.0
// train/use_model.h: what follows training: `eval` measures a checkpoint's model on a dataset, `predict` writes what it says about
// each sample.
//
// Flow:    a checkpoint -> Task::make_model -> evaluate(), or Task::forward -> stdout and --metrics, or --output
// Threads: one thread
// Ranks:   all ranks share the samples out among them; rank 0 reads the checkpoint, prints and writes
#pragma once

#include <functional>

#include "lockstep/task.h"
#include "lockstep/train/options/options.h"
#include "lockstep/world.h"

namespace lockstep {

// The data: that of the training, unless options.source says another; of it the validation set, or all samples if it has none.
// Blocks. Throws UsageError, CheckpointError, DataError, SystemError, PeerLost.
void use_model(const World& world, TrainOptions options, const std::function<Task(const TrainOptions&)>& make_task);

// Before ranks are started: throws UsageError where predictions can't be written.
void require_output(const TrainOptions& options);

}  // namespace lockstep
