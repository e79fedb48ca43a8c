// SPDX-License-Identifier: Apache-2.0
// strategy/kvstore/dist_setting.h: what the servers and workers of a store agree on before they start.
//
// Flow:    StrategyOptions -> here -> client.h, server.h and the strategies over them
// Owns:    this rank's links
// Threads: one thread
// Ranks:   connect_store, share_model and broadcast_model are calls of all ranks
#pragma once

#include <torch/nn/module.h>

#include "lockstep/strategy.h"
#include "lockstep/strategy/kvstore/client.h"
#include "lockstep/strategy/kvstore/link.h"
#include "lockstep/strategy/kvstore/server.h"

namespace lockstep {

struct DistSetting {
  World world;
  Roles roles;
  Links links;
  bool serves = false;  // this rank
  KVStoreKind kind = KVStoreKind::kDistSync;
  bool update_in_store = true;

  bool in_step() const { return kind == KVStoreKind::kDistSync; }
  int first_worker() const { return roles.workers.front(); }

  // The ranks of the training loop: without dist_sync every rank goes at its own pace.
  World loop_world(const World& all) const { return in_step() ? all : World::single(); }

  // Compares the models of all ranks, then gives all of them the first worker's.
  void share_model(const torch::nn::Module& model) const;

  // Every rank's parameters and buffers become those of `root`.
  void broadcast_model(const torch::nn::Module& model, int root) const;

  StoreClientOptions client_options(const StrategyOptions& options) const;
  StoreServerOptions server_options(const StrategyOptions& options) const;
};

// Agrees on roles and connects every worker with every server. Throws UsageError: no server, no worker, or options that
// its servers cannot follow.
DistSetting connect_store(const World& world, const StrategyOptions& options);

}  // namespace lockstep
