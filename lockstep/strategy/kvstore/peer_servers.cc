// SPDX-License-Identifier: Apache-2.0
#include "lockstep/strategy/kvstore/peer_servers.h"

#include <exception>

namespace lockstep {
namespace {

// The loss of a server is not reported here: it ends the workers, and their loss ends this server.
void tell(const Link& link, Request request) {
  try {
    link.send(RequestHeader{.request = request});
  } catch (const std::exception&) {
  }
}

}  // namespace

PeerServers::PeerServers(std::vector<Link> links, std::chrono::milliseconds interval) {
  for (Link& link : links) peers_.push_back(std::make_unique<Peer>(std::move(link)));
  if (!peers_.empty()) thread_ = std::thread([this, interval] { keep_alive(interval); });
}

PeerServers::~PeerServers() {
  const bool failed = std::uncaught_exceptions() > 0;
  if (failed)
    for (const auto& peer : peers_) peer->link.abandon("the first server has failed");
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
  }
  stopped_.notify_all();
  if (thread_.joinable()) thread_.join();
  for (const auto& peer : peers_)
    if (!failed) tell(peer->link, Request::kGoodbye);
}

// A peer that for_each() talks to right now hears from this server anyway: it is left out, not waited for.
void PeerServers::keep_alive(std::chrono::milliseconds interval) {
  std::unique_lock lock(mutex_);
  while (!stopped_.wait_for(lock, interval, [this] { return stop_; }))
    for (const auto& peer : peers_)
      if (const std::unique_lock free(peer->in_use, std::try_to_lock); free) tell(peer->link, Request::kAlive);
}

}  // namespace lockstep
