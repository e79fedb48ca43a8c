// SPDX-License-Identifier: Apache-2.0
// strategy/kvstore/client.h: a worker's side of a store on servers.
//
// Flow:    values of the devices -> summed here (level 1) -> link.h -> servers (level 2), and back
// Owns:    its ends of the links; for each server a block to send from and one to receive into: 2 K bytes
// Threads: one thread
// Ranks:   a worker
#pragma once

#include "lockstep/strategy/kvstore/messages.h"
#include "lockstep/strategy/kvstore/store.h"

namespace lockstep {

class StoreClient : public Store {
 public:
  // devices: may be null, then the calling thread makes all copies.
  StoreClient(const DistSetting& setting, Devices* devices);

  // Says goodbye; not while an exception is in flight, so that the servers notice that this worker is lost.
  ~StoreClient() override;
  StoreClient(const StoreClient&) = delete;
  StoreClient& operator=(const StoreClient&) = delete;

  // This worker gives up: its servers get PeerLost with the reason. The store is of no use after that.
  void abandon(const std::string& reason) const;

  void set_optimizer(const UpdateOptions& options) override;
  using Store::pull;
  using Store::push;
  using Store::push_pull;
  void push(KeyRange keys, const DeviceTensors& values, const PushOptions& options) override;
  void pull(KeyRange keys, const DeviceTensors& into) override;
  void push_pull(KeyRange keys, const DeviceTensors& values, const DeviceTensors& into,
                 const PushOptions& options) override;

  std::int64_t bytes_pushed() const override { return bytes_pushed_; }
  std::int64_t bytes_pulled() const override { return bytes_pulled_; }

 protected:
  void create(const std::vector<torch::Tensor>& values) override;
  torch::Tensor pull_rows(std::size_t key, const torch::Tensor& rows) override;

 private:
  struct Server {
    Link link;
    BlockLayout layout{};
    torch::Tensor outbox{};
    torch::Tensor inbox{};
    std::vector<torch::Tensor> residuals{};  // [slice] what compression has left out so far
    std::vector<Pending> sends{};            // in flight
    std::vector<Pending> receives{};
  };
  struct Push {
    KeyRange keys;
    std::vector<torch::Tensor> values;  // [key - keys.first] summed over the devices; undefined: none
    RequestHeader header{};
    const torch::Tensor& of(const KeySlice& slice) const { return values[slice.key - keys.first]; }
  };

  template <class Ask, class Hear>
  void exchange(const Ask& ask, const Hear& hear);
  [[noreturn]] void give_up(const Server& lost, const PeerLost& error);
  void require_possible(const UpdateOptions& options) const;
  Push make_push(Request request, KeyRange keys, const DeviceTensors& values, const PushOptions& options);
  void start_push(Server& server, const Push& push, std::span<const SliceRange> parts);
  void start_pull(Server& server, SliceRange slices);
  static void pack(const Server& server, SliceRange slices, const Push& push);
  static torch::Tensor compress(Server& server, SliceRange slices, const Push& push);
  void unpack(KeyRange keys, const DeviceTensors& into);
  bool any_trained(KeyRange keys) const;

  DistSetting setting_;
  std::vector<Server> servers_;
  bool in_parts_;  // a slice can be updated without the gradients of the others
  std::int64_t bytes_pushed_ = 0;
  std::int64_t bytes_pulled_ = 0;
};

}  // namespace lockstep
