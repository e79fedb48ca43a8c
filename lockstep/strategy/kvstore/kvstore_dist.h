// strategy/kvstore/kvstore_dist.h: the strategy `kvstore` between processes: servers and workers go through the same
// loop.
//
//   worker   trains on its part of the batches; pushes and pulls in update()
//   server   its threads serve; its loop counts a step once every worker has pushed it, validates and saves
//
// Flow:    kvstore_strategy.h -> here
// Ranks:   all of the world: servers first
#pragma once

#include <memory>

#include "lockstep/strategy.h"
#include "lockstep/strategy/kvstore/messages.h"
#include "lockstep/strategy/kvstore/server.h"

namespace lockstep {

// What servers and workers agree on.
struct DistSetting {
  World world;
  Roles roles;
  Consistency consistency = Consistency::kSync;
  bool update_in_store = true;

  bool in_step() const { return consistency == Consistency::kSync; }
  int first_worker() const { return roles.workers.front(); }
};

std::unique_ptr<Strategy> make_kvstore_worker(const DistSetting& setting, std::vector<Link> servers,
                                              const World& workers, const Task& task, const StrategyOptions& options);
std::unique_ptr<Strategy> make_kvstore_server(const DistSetting& setting, Links links, const Task& task,
                                              const StrategyOptions& options);

// Parameters and buffers of `root`'s model become everybody's. All ranks call.
void broadcast_model(const World& world, const torch::nn::Module& model, int root);

}  // namespace lockstep
