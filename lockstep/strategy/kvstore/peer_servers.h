// SPDX-License-Identifier: Apache-2.0
// strategy/kvstore/peer_servers.h: the first server's links to the other servers.
//
// The first server asks the others for their slices only when it validates or saves. In between a thread tells them that
// it is alive: a server takes a client that is silent for too long for lost.
//
// Flow:    server_strategy.cc -> here -> link.h -> server.h
// Owns:    the links, the thread
// Threads: for_each() from one
// Ranks:   the first server
#pragma once

#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "lockstep/strategy/kvstore/messages.h"

namespace lockstep {

class PeerServers {
 public:
  // interval: how often they are told.
  PeerServers(std::vector<Link> links, std::chrono::milliseconds interval);
  ~PeerServers();  // says goodbye; while an exception is in flight it ends the links instead
  PeerServers(const PeerServers&) = delete;
  PeerServers& operator=(const PeerServers&) = delete;

  // Calls talk(link) for one after the other. Throws what `talk` throws.
  template <class Talk>
  void for_each(const Talk& talk) {
    for (const auto& peer : peers_) {
      const std::lock_guard lock(peer->in_use);
      talk(peer->link);
    }
  }

 private:
  struct Peer {
    explicit Peer(Link to) : link(std::move(to)) {}
    Link link;
    std::mutex in_use;
  };

  void keep_alive(std::chrono::milliseconds interval);

  std::vector<std::unique_ptr<Peer>> peers_;
  std::mutex mutex_;
  std::condition_variable stopped_;
  bool stop_ = false;
  std::thread thread_;
};

}  // namespace lockstep
