// SPDX-License-Identifier: Apache-2.0
// train/evaluate.h: evaluate() of what a strategy trains.
//
// Flow:    the validation set -> Strategy::forward -> Task::loss, Task::correct, Task::metrics -> sums over all ranks
// Threads: one thread
// Ranks:   every rank calls it and computes its part; all get the same exact result
#pragma once

#include "lockstep/evaluate.h"
#include "lockstep/strategy.h"
#include "lockstep/train/reports/metrics.h"

namespace lockstep {

Evaluation evaluate(const World& world, const Task& task, Strategy& strategy, const DatasetPtr& dataset,
                    LoaderOptions options);

// Adds loss, accuracy and metrics to an event of the metrics file, with this before their names. A table of many numbers is left out.
void add_evaluation(Json& event, const std::string& prefix, const Evaluation& evaluation);

}  // namespace lockstep
