// SPDX-License-Identifier: Apache-2.0
// train/choose_strategy.h: `--strategy auto`: what `lockstep plan` would recommend for this machine, its devices and this batch.
//
// Flow:    TrainOptions -> tools/plan/auto.h -> TrainOptions with a strategy
// Threads: before the process has others (it forks)
// Ranks:   before ranks are started
#pragma once

#include "lockstep/task.h"
#include "lockstep/train/options/options.h"

namespace lockstep {

// Sets the strategy and its options, and logs in one line which and why. Blocks for 20 to 30 s where there is a choice. Throws
// UsageError: ranks that a launcher has started, GPUs; what measuring throws.
void choose_strategy(TrainOptions& options, const Task& task);

}  // namespace lockstep
