// SPDX-License-Identifier: Apache-2.0
// train/evaluate.h: evaluate() of what a strategy trains.
//
// Flow:    the validation set -> Strategy::forward -> Task::loss and Task::correct -> sums over all ranks
// Threads: one thread
// Ranks:   every rank calls it and computes its part; all get the same exact result
#pragma once

#include "lockstep/evaluate.h"
#include "lockstep/strategy.h"

namespace lockstep {

Evaluation evaluate(const World& world, const Task& task, Strategy& strategy,
                    const std::shared_ptr<const Dataset>& dataset, LoaderOptions options);

}  // namespace lockstep
