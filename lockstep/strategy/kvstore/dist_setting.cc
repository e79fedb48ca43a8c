// SPDX-License-Identifier: Apache-2.0
#include "lockstep/strategy/kvstore/dist_setting.h"

#include "lockstep/error.h"
#include "lockstep/model/parameters.h"

namespace lockstep {
namespace {

constexpr double kDefaultThreshold = 0.5;

// Workers in step wait for each other, too: with dist_sync they find out first who is lost, and tell the servers.
LinkTimeouts timeouts_for(KVStoreKind kind, std::chrono::milliseconds timeout) {
  return {.of_servers = kind == KVStoreKind::kDistSync ? 2 * timeout : timeout, .of_clients = 3 * timeout};
}

}  // namespace

void DistSetting::share_model(const torch::nn::Module& model) const {
  require_same_model(world, named_parameters(model));
  broadcast_model(model, first_worker());
}

void DistSetting::broadcast_model(const torch::nn::Module& model, int root) const {
  broadcast_tensors(world, named_parameters(model), root);
  broadcast_tensors(world, named_buffers(model), root);
}

StoreClientOptions DistSetting::client_options(const StrategyOptions& options) const {
  const double amount = options.compression.amount == 0 ? kDefaultThreshold : options.compression.amount;
  return {.kind = kind,
          .worker = roles.worker_of(world.rank()),
          .split_above = options.kvstore.split_above,
          .threshold = options.compression.kind == Compression::kTwoBit ? amount : 0};
}

StoreServerOptions DistSetting::server_options(const StrategyOptions& options) const {
  return {.kind = kind,
          .staleness = options.kvstore.staleness,
          .workers = roles.workers,
          .server = roles.server_of(world.rank()),
          .servers = static_cast<int>(roles.servers.size()),
          .timeout = options.timeout};
}

DistSetting connect_store(const World& world, const StrategyOptions& options) {
  const bool serves = options.kvstore.serves.value_or(world.rank() < options.kvstore.servers);
  DistSetting setting{.world = world,
                      .roles = agree_on_roles(world, serves),
                      .links = {},
                      .serves = serves,
                      .kind = options.kvstore.kind,
                      .update_in_store = options.kvstore.update_on_kvstore};
  if (options.clipping.max_norm > 0 && setting.roles.servers.size() > 1 && setting.update_in_store)
    throw UsageError({.what = "--clip-norm where several servers update: none of them knows the norm of all gradients",
                      .next = "take one server, or dist_sync with --update-on-kvstore false"});
  setting.links = connect_links(world, setting.roles, timeouts_for(setting.kind, options.timeout));
  return setting;
}

}  // namespace lockstep
