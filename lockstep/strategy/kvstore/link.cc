// SPDX-License-Identifier: Apache-2.0
#include "lockstep/strategy/kvstore/link.h"

#include <algorithm>
#include <map>
#include <set>

#include "lockstep/base/text.h"
#include "lockstep/error.h"

namespace lockstep {
namespace {

struct Pair {
  int server = 0;  // rank
  int client = 0;
};

std::vector<Pair> pairs_of(const Roles& roles) {
  std::vector<Pair> pairs;
  for (const int server : roles.servers) {
    for (const int worker : roles.workers) pairs.push_back({server, worker});
    if (server != roles.servers.front()) pairs.push_back({server, roles.servers.front()});
  }
  return pairs;
}

// Takes out of `pairs` those that can connect at the same time: every rank is in at most one of them.
std::vector<Pair> take_round(std::vector<Pair>& pairs) {
  std::vector<Pair> round;
  std::set<int> taken;
  std::erase_if(pairs, [&](const Pair& pair) {
    if (taken.contains(pair.server) || taken.contains(pair.client)) return false;
    taken.insert({pair.server, pair.client});
    round.push_back(pair);
    return true;
  });
  return round;
}

int place_in(const std::vector<int>& ranks, int rank) {
  const auto found = std::ranges::find(ranks, rank);
  return found == ranks.end() ? -1 : static_cast<int>(found - ranks.begin());
}

// In the order of `ranks`; ranks without a link are left out.
std::vector<Link> in_order(const std::map<int, Link>& links, const std::vector<int>& ranks) {
  std::vector<Link> ordered;
  for (const int rank : ranks)
    if (const auto found = links.find(rank); found != links.end()) ordered.push_back(found->second);
  return ordered;
}

}  // namespace

void Link::send_bytes(const torch::Tensor& bytes) const {
  if (bytes.numel() > 0) pair_.send(bytes, peer(), next(tags_->sent));
}

void Link::receive_bytes(const torch::Tensor& bytes) const {
  if (bytes.numel() > 0) pair_.receive(bytes, {.from = peer(), .tag = next(tags_->received)});
}

Work Link::start_receiving(const torch::Tensor& bytes) const {
  return pair_.receive_async(bytes, {.from = peer(), .tag = next(tags_->received)});
}

Work Link::start_sending(const torch::Tensor& bytes) const {
  return pair_.send_async(bytes, peer(), next(tags_->sent));
}

torch::Tensor Link::allocate(std::int64_t bytes) const { return pair_.allocate({bytes}, torch::kUInt8).zero_(); }

int Roles::server_of(int rank) const { return place_in(servers, rank); }
int Roles::worker_of(int rank) const { return place_in(workers, rank); }

Roles agree_on_roles(const World& world, bool serves) {
  const torch::Tensor all = world.all_gather(torch::tensor({serves ? 1 : 0}));
  Roles roles;
  for (int rank = 0; rank < world.size(); ++rank)
    (all[rank].item<std::int64_t>() == 1 ? roles.servers : roles.workers).push_back(rank);
  if (roles.workers.empty() || roles.servers.empty() || roles.servers.front() != 0)
    throw UsageError({.what = concat(roles.servers.size(), " servers and ", roles.workers.size(), " workers among ",
                                     world.size(), " ranks; rank 0 has to be a server"),
                      .here = world.describe(),
                      .next = "start at least one server and one worker, servers first: --servers 1 --ranks 2"});
  return roles;
}

// World::separate() is a call of all ranks, so the pairs connect in rounds that every rank computes alike. In each
// round a rank names its pair, or nobody if it has none: a rank never waits for a pair that it is not part of.
Links connect_links(const World& world, const Roles& roles, const LinkTimeouts& timeouts) {
  std::vector<Pair> left = pairs_of(roles);
  std::map<int, Link> to_clients;  // by rank
  std::map<int, Link> to_servers;
  while (!left.empty()) {
    std::vector<int> mine;
    for (const Pair& pair : take_round(left))
      if (pair.server == world.rank() || pair.client == world.rank()) mine = {pair.server, pair.client};
    const bool serves = !mine.empty() && mine[0] == world.rank();
    const auto pair = world.separate(mine, serves ? timeouts.of_servers : timeouts.of_clients);
    if (!pair) continue;
    if (serves)
      to_clients.emplace(mine[1], Link(*pair, mine[1]));
    else
      to_servers.emplace(mine[0], Link(*pair, mine[0]));
  }
  Links links{.clients = in_order(to_clients, roles.workers), .servers = in_order(to_servers, roles.servers)};
  for (Link& first_server : in_order(to_clients, {roles.servers.front()})) links.clients.push_back(first_server);
  return links;
}

}  // namespace lockstep
