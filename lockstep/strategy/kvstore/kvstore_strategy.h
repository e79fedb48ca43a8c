// SPDX-License-Identifier: Apache-2.0
// strategy/kvstore/kvstore_strategy.h: the strategy `kvstore`: a store of weights that devices push gradients to and pull
// weights from. lockstep/kvstore.h lists its kinds; `local` picks one of the local ones, and logs which and why.
//
// Flow:    Batch -> towers.h -> Store -> the devices' replicas
// Owns:    the devices' threads, a replica per device, the store
// Ranks:   all ranks call
//
// dist_*: servers and workers go through the same training loop. A worker trains on its part of the batches. A server's
// threads serve; its loop counts a step once every worker has pushed it, validates and saves.
#pragma once

#include <memory>

#include "lockstep/strategy.h"

namespace lockstep {

struct DistSetting;

constexpr bool has_servers(KVStoreKind kind) { return kind >= KVStoreKind::kDistSync; }
constexpr bool goes_on_without_workers(KVStoreKind kind) { return kind > KVStoreKind::kDistSync; }

// Throws UsageError.
std::unique_ptr<Strategy> make_kvstore_strategy(const World& world, const Task& task, const StrategyOptions& options);

// server_strategy.cc: the strategy of a server.
std::unique_ptr<Strategy> make_server_strategy(const DistSetting& setting, const Task& task);

}  // namespace lockstep
