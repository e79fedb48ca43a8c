// SPDX-License-Identifier: Apache-2.0
// strategy/kvstore/kvstore_strategy.h: the strategy `kvstore`: a store of weights that devices push gradients to and pull
// weights from. lockstep/kvstore.h lists its kinds; `local` picks one of the local ones, and logs which and why.
//
// Ranks:   all ranks call
#pragma once

#include <memory>

#include "lockstep/strategy.h"

namespace lockstep {

bool has_servers(KVStoreKind kind);              // dist_*
bool goes_on_without_workers(KVStoreKind kind);  // dist_async, dist_bounded

// Throws UsageError.
std::unique_ptr<Strategy> make_kvstore_strategy(const World& world, const Task& task, const StrategyOptions& options);

}  // namespace lockstep
