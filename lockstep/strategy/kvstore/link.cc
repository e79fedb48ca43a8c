// SPDX-License-Identifier: Apache-2.0
#include "lockstep/strategy/kvstore/link.h"

#include "lockstep/base/require.h"
#include "lockstep/base/text.h"
#include "lockstep/collective/world/world_state.h"
#include "lockstep/error.h"
#include "lockstep/model/parameters.h"
#include "lockstep/strategy/kvstore/messages.h"

namespace lockstep {
namespace {

void find_roles(DistSetting& setting) {
  const World& world = setting.world;
  const KVStoreOptions& store = setting.options.kvstore;
  const std::optional<bool> told = store.serves ? store.serves : WorldState::of(world).serves;
  const bool serves = told.value_or(world.rank() < store.servers);
  const Tensor all = world.all_gather(torch::tensor({serves ? 1 : 0}));
  for (int rank = 0; rank < world.size(); ++rank)
    (all[rank].item<int64_t>() == 1 ? setting.servers : setting.workers).push_back(rank);
  if (setting.workers.empty() || setting.servers.empty() || setting.servers.front() != 0)
    throw UsageError({.what = concat(setting.servers.size(), " servers and ", setting.workers.size(), " workers among ",
                                     world.size(), " ranks; rank 0 has to be a server"),
                      .here = world.describe(),
                      .next = "start at least one server and one worker: lockstep run --servers 1 --nproc-per-node 3"});
  const std::vector<int>& alike = serves ? setting.servers : setting.workers;
  setting.number = index_of(alike, world.rank());
}

// pair: a server and its client, one of which is this rank; or nobody. Clients wait longest: so a server finds out who
// is lost, and its other clients hear of that instead of taking the server for lost. Workers in step wait for each
// other, too: with dist_sync they find out first who is lost, and tell the servers.
void connect(DistSetting& setting, const std::vector<int>& pair) {
  const bool serves = !pair.empty() && pair[0] == setting.world.rank();
  const auto world = setting.world.separate(pair, (!serves ? 3 : setting.in_step() ? 2 : 1) * setting.options.timeout);
  if (world) (serves ? setting.to_clients : setting.to_servers).emplace_back(*world, serves ? pair[1] : pair[0]);
}

// World::separate() is a call of all ranks, so pairs connect in rounds, in which every rank is in at most one pair, and
// never waits for a pair that it is not part of. Round r: server s and worker s + r, modulo the larger of their numbers.
// Then the first server connects with the others.
void connect_pairs(DistSetting& setting) {
  const std::vector<int>& servers = setting.servers;
  const std::vector<int>& workers = setting.workers;
  const int rank = setting.world.rank();
  const auto mine = [&](int server, int client) {
    return rank == server || rank == client ? std::vector{server, client} : std::vector<int>();
  };
  const size_t rounds = std::max(servers.size(), workers.size());
  for (size_t round = 0; round < rounds; ++round) {
    std::vector<int> pair;
    for (size_t server = 0; server < servers.size() && pair.empty(); ++server)
      if (const size_t worker = (server + round) % rounds; worker < workers.size())
        pair = mine(servers[server], workers[worker]);
    connect(setting, pair);
  }
  std::ranges::sort(setting.to_clients, {}, &StoreLink::peer_in_job);
  std::ranges::sort(setting.to_servers, {}, &StoreLink::peer_in_job);
  for (size_t server = 1; server < servers.size(); ++server) connect(setting, mine(servers[server], servers.front()));
}

}  // namespace

void DistSetting::abandon(const std::string& reason) const {
  for (const StoreLink& link : to_clients) link.abandon(reason);
  for (const StoreLink& link : to_servers) link.abandon(reason);
}

void DistSetting::share_model(const torch::nn::Module& model) const {
  require_same_model(world, named_parameters(model));
  broadcast_model(world, model, workers.front());
}

void tell(const StoreLink& server, Request request) {
  try {
    server.send(RequestHeader{.request = request});
  } catch (const std::exception&) {
  }
}

void say_goodbye(const std::vector<StoreLink>& to_servers) {
  for (const StoreLink& server : to_servers) tell(server, Request::kGoodbye);
}

DistSetting connect_store(const World& world, const StrategyOptions& options) {
  DistSetting setting{.world = world, .options = options};
  find_roles(setting);
  require(options.clipping.max_norm == 0 || setting.servers.size() == 1 || !options.kvstore.update_on_kvstore,
          "--clip-norm where several servers update: none of them knows the norm of all gradients",
          "take one server, or dist_sync with --update-on-kvstore false");
  connect_pairs(setting);
  setting.alike = world.split(setting.serves() ? 0 : 1);
  return setting;
}

}  // namespace lockstep
