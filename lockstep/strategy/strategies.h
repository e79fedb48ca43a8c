// SPDX-License-Identifier: Apache-2.0
// strategy/strategies.h: makes each strategy; the table in strategy.cc lists them. What a strategy does is described at the
// top of its source.
//
// Ranks:   all ranks call
#pragma once

#include "lockstep/strategy.h"

namespace lockstep {

std::unique_ptr<Strategy> make_ddp(const World& world, const Task& task, const StrategyOptions& options);
std::unique_ptr<Strategy> make_towers(const World& world, const Task& task, const StrategyOptions& options);
std::unique_ptr<Strategy> make_data_parallel(const World& world, const Task& task, const StrategyOptions& options);
std::unique_ptr<Strategy> make_averaging(const World& world, const Task& task, const StrategyOptions& options);

// Throws UsageError: a model that can't be cut, stages that do not divide the devices; with several ranks also several
// devices in a rank, or clipping by norm (no rank has the norm of all gradients). MismatchError: the ranks' models differ.
std::unique_ptr<Strategy> make_pipeline(const World& world, const Task& task, const StrategyOptions& options);

}  // namespace lockstep
