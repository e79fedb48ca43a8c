// SPDX-License-Identifier: Apache-2.0
// strategy/kvstore/link.h: the connection between a server and one of its clients, and who is connected to whom.
//
// Flow:    worker.cc -> here -> World's messages -> server.h, and back
// Owns:    a StoreLink: a World of two ranks, the server and the client, with connections of its own
// Threads: a StoreLink belongs to one thread, but for abandon()
// Ranks:   one of the two; connect_store() and share_model() are called by all ranks
#pragma once

#include <torch/nn/module.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "lockstep/strategy.h"
#include "lockstep/world.h"

namespace lockstep {

// A message that was started; none if it has no bytes.
using Pending = std::optional<Work>;

inline void wait(Pending& message) {
  if (message) message->wait();
}
inline void finish(std::vector<Pending>& all) {
  std::ranges::for_each(all, wait);
  all.clear();
}

class StoreLink {
 public:
  StoreLink(World pair, int peer_in_job) : pair_(std::move(pair)), peer_in_job_(peer_in_job) {}

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
  void send_bytes(const Tensor& bytes) const {
    if (bytes.numel() > 0) pair_.send(bytes, peer(), next(tags_->sent));
  }
  void receive_bytes(const Tensor& bytes) const {
    if (bytes.numel() > 0) pair_.receive(bytes, {.from = peer(), .tag = next(tags_->received)});
  }
  [[nodiscard]] Pending start_sending(const Tensor& bytes) const {
    if (bytes.numel() == 0) return {};
    return pair_.send_async(bytes, peer(), next(tags_->sent));
  }
  template <class T>
  [[nodiscard]] Pending start_sending_copy(std::span<const T> values) const {
    return start_sending(bytes_of(const_cast<T*>(values.data()), values.size()).clone());
  }
  [[nodiscard]] Pending start_receiving(const Tensor& bytes) const {
    if (bytes.numel() == 0) return {};
    return pair_.receive_async(bytes, {.from = peer(), .tag = next(tags_->received)});
  }

  // Zeros, where the other side can read them.
  Tensor allocate(int64_t bytes) const { return pair_.allocate({bytes}, torch::kUInt8).zero_(); }
  const World& world() const { return pair_; }
  int peer() const { return 1 - pair_.rank(); }
  int peer_in_job() const { return peer_in_job_; }  // its rank among all servers and workers

  // Ends every wait at both ends. From any thread.
  void abandon(const std::string& reason) const { pair_.abandon(reason); }

 private:
  template <class T>
  static Tensor bytes_of(T* data, size_t count) {
    static_assert(std::is_trivially_copyable_v<T>);
    return torch::from_blob(data, {static_cast<int64_t>(count * sizeof(T))}, torch::kUInt8);
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

// The agreement of the servers and workers of a store before they start, and the links of this rank.
struct DistSetting {
  World world;
  StrategyOptions options;
  std::vector<int> servers{};  // their ranks, in order
  std::vector<int> workers{};
  int number = 0;                // of this rank, among the servers or the workers
  std::optional<World> alike{};  // the servers, or the workers
  std::vector<StoreLink>
      to_clients{};  // of a server: the workers in order; then, for all but the first, the first server
  std::vector<StoreLink> to_servers{};  // of a client; the first server is a client of the others

  bool serves() const { return !to_clients.empty(); }
  bool in_step() const { return options.kvstore.kind == KVStoreKind::kDistSync; }

  // The ranks of the training loop: without dist_sync every rank goes at its own pace.
  World loop_world(const World& all) const { return in_step() ? all : World::single(); }

  // Ends every wait of this rank and of those that it is linked with.
  void abandon(const std::string& reason) const;

  // Compares the models of all ranks, then gives all of them the first worker's.
  void share_model(const torch::nn::Module& model) const;
};

// Tells servers that this client leaves in good order. Does nothing for those that are gone already.
void say_goodbye(const std::vector<StoreLink>& to_servers);

// Connects every worker with every server. Throws UsageError: no server, no worker, rank 0 is a worker, or options that
// servers cannot follow.
DistSetting connect_store(const World& world, const StrategyOptions& options);

}  // namespace lockstep
