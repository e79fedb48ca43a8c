// strategy/kvstore/kvstore_strategy.h: the strategy `kvstore`: a store of weights that devices push gradients to and
// pull from. S2.
//
//   local                   picks one of the next three, and logs which and why
//   local_update_cpu        gradients summed on the CPU, updated there
//   local_allreduce_cpu     summed on the CPU, every device updates
//   local_allreduce_device  summed on device 0, every device updates
//   dist_sync               servers wait for all workers; one update for the batch of all
//   dist_async              servers update with each worker's gradient as it comes
//   dist_bounded            the same, but no gradient gets older than `staleness` updates
#pragma once

#include <memory>

#include "lockstep/strategy.h"

namespace lockstep {

bool has_servers(KVStoreKind kind);              // dist_*
bool goes_on_without_workers(KVStoreKind kind);  // dist_async, dist_bounded

// All ranks call. Throws UsageError.
std::unique_ptr<Strategy> make_kvstore(const World& world, const Task& task, const StrategyOptions& options);

}  // namespace lockstep
