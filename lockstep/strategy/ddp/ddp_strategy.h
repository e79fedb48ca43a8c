// SPDX-License-Identifier: Apache-2.0
// strategy/ddp/ddp_strategy.h: `ddp` and `single`: a replica of the model in every rank, kept equal by
// DistributedDataParallel (lockstep/ddp.h).
#pragma once

#include <memory>

#include "lockstep/strategy.h"

namespace lockstep {

// In a world of one there is nothing to exchange, and it is `single`.
std::unique_ptr<Strategy> make_ddp(const World& world, const Task& task, const StrategyOptions& options);

}  // namespace lockstep
