// SPDX-License-Identifier: Apache-2.0
// strategy/kvstore/link.h: the connection between a server and one of its clients, and who is connected to whom.
//
// Flow:    client.h -> here -> World's messages -> server.h, and back
// Owns:    a Link: a World of two ranks, the server and the client, with connections of its own
// Threads: a Link belongs to one thread, but for abandon()
// Ranks:   one of the two; connect_links() and agree_on_roles() are called by all ranks
#pragma once

#include <torch/types.h>

#include <chrono>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "lockstep/world.h"

namespace lockstep {

class Link {
 public:
  Link(World pair, int peer_in_job) : pair_(std::move(pair)), peer_in_job_(peer_in_job) {}

  // Values as raw bytes: both sides run the same program, and know how many there are. Send and receive block until
  // the values are on their way, or there. Throw PeerLost.
  template <class T>
  void send(const T& value) const {
    send_all(std::span(&value, 1));
  }
  template <class T>
  T receive() const {
    T value{};
    receive_all(std::span(&value, 1));
    return value;
  }
  template <class T>
  void send_all(std::span<const T> values) const {
    send_bytes(bytes_of(const_cast<T*>(values.data()), values.size()));
  }
  template <class T>
  void receive_all(std::span<T> values) const {
    receive_bytes(bytes_of(values.data(), values.size()));
  }
  void send_bytes(const torch::Tensor& bytes) const;
  void receive_bytes(const torch::Tensor& bytes) const;
  [[nodiscard]] Work start_sending(const torch::Tensor& bytes) const;    // not empty
  [[nodiscard]] Work start_receiving(const torch::Tensor& bytes) const;  // not empty

  torch::Tensor allocate(std::int64_t bytes) const;  // zeros, where the other side can read them
  const World& world() const { return pair_; }
  int peer() const { return 1 - pair_.rank(); }
  int peer_in_job() const { return peer_in_job_; }  // its rank among all servers and workers

  // Ends every wait at both ends. From any thread.
  void abandon(const std::string& reason) const { pair_.abandon(reason); }

 private:
  template <class T>
  static torch::Tensor bytes_of(T* data, std::size_t count) {
    static_assert(std::is_trivially_copyable_v<T>);
    return torch::from_blob(data, {static_cast<std::int64_t>(count * sizeof(T))}, torch::kUInt8);
  }

  // Each message has a tag of its own: with several of one tag in flight over Gloo, a worker and its server hung.
  struct Tags {
    int sent = 0;
    int received = 0;
  };
  static int next(int& tag) { return tag = tag % kTags + 1; }
  static constexpr int kTags = 1 << 20;

  World pair_;
  int peer_in_job_;
  std::shared_ptr<Tags> tags_ = std::make_shared<Tags>();
};

// Which ranks are servers and which are workers, both in order.
struct Roles {
  std::vector<int> servers;
  std::vector<int> workers;
  int server_of(int rank) const;  // its number among the servers; -1: it is none
  int worker_of(int rank) const;
};

// serves: does this rank? Throws UsageError: no server, no worker, or rank 0 is a worker.
Roles agree_on_roles(const World& world, bool serves);

// How long each side of a link waits for the other. Clients wait longest: so a server finds out who is lost, and its
// other clients hear of that instead of taking the server for lost.
struct LinkTimeouts {
  std::chrono::milliseconds of_servers;
  std::chrono::milliseconds of_clients;
};

// The links of this rank.
struct Links {
  std::vector<Link> clients;  // of a server: the workers in order; behind them, for all but the first, the first server
  std::vector<Link> servers;  // of a client; the first server is a client of the others
};
Links connect_links(const World& world, const Roles& roles, const LinkTimeouts& timeouts);

}  // namespace lockstep
