// strategy/kvstore/dist_kvstore.h: a worker's side of a store on servers. S2.
//
// Flow:    values of the devices -> summed here (level 1) -> messages.h -> servers (level 2), and back
// Owns:    its ends of the links; for each server a block to send from and one to receive into
// Threads: one thread
// Ranks:   a worker. What dist_sync merges, every worker pushes
//
// Notation: K bytes of values, N workers, S servers. A push or a pull sends K, spread over the servers; each server
// sends and receives N K / S. With two bits a push of float32 sends K / 16.
//
// Every call blocks until all servers have answered. Throws PeerLost: a server is lost, or has given up because another
// worker is; afterwards the store is of no use.
#pragma once

#include <string>
#include <vector>

#include "lockstep/base/error.h"
#include "lockstep/strategy/kvstore/kvstore.h"
#include "lockstep/strategy/kvstore/messages.h"
#include "lockstep/strategy/kvstore/server.h"

namespace lockstep {

struct DistKVStoreOptions {
  Consistency consistency = Consistency::kSync;
  int worker = 0;  // the first one's values count in init()
  std::int64_t split_above = 1'000'000;
  double threshold = 0;  // of two-bit compression; 0: none
};

class DistKVStore : public KVStore {
 public:
  // servers: in order. devices: may be null, then all copies are made on the calling thread.
  DistKVStore(const DistKVStoreOptions& options, std::vector<Link> servers, Devices* devices);

  // Says goodbye, unless an exception is on its way out: then the servers notice that this worker is lost.
  ~DistKVStore() override;
  DistKVStore(const DistKVStore&) = delete;
  DistKVStore& operator=(const DistKVStore&) = delete;

  // This worker gives up: every server that hears of it says why. Of no use after that.
  void abandon(const std::string& reason) const;

  void set_optimizer(const StrategyOptions& options) override;
  using KVStore::pull;
  using KVStore::push;
  using KVStore::push_pull;
  void push(KeyRange keys, const DeviceTensors& values, const PushOptions& options) override;
  void pull(KeyRange keys, const DeviceTensors& into) override;

  // With dist_sync part by part: while some are pushed, others are merged, and others come back. Not where gradients
  // are clipped by their common norm.
  void push_pull(KeyRange keys, const DeviceTensors& values, const DeviceTensors& into,
                 const PushOptions& options) override;
  torch::Tensor row_sparse_pull(const std::string& name, const torch::Tensor& rows) override;

  std::int64_t bytes_pushed() const { return bytes_pushed_; }  // values, as they travelled
  std::int64_t bytes_pulled() const { return bytes_pulled_; }

 protected:
  void create(const std::vector<torch::Tensor>& values) override;

 private:
  struct Server {
    Link link;
    BlockLayout layout{};
    torch::Tensor outbox{};
    torch::Tensor inbox{};
    std::vector<torch::Tensor> residuals{};  // of its slices, with compression
    std::vector<Work> sending{};
    std::vector<Work> receiving{};
  };

  template <class Ask, class Answer>
  void with_servers(const Ask& ask, const Answer& answer);
  [[noreturn]] void give_up(const Server& lost, const PeerLost& error);
  void send_payload(Server& server, const torch::Tensor& bytes);
  // What is pushed of `keys`: their values, added up over the devices.
  struct Push {
    KeyRange keys;
    std::vector<torch::Tensor> values;  // dense views; undefined: none
    QuestionHeader header;
    const torch::Tensor& of(const KeySlice& slice) const {
      return values[static_cast<std::size_t>(slice.key - keys.first)];
    }
  };
  Push to_push(KeyRange keys, const DeviceTensors& values, const PushOptions& options);
  static torch::Tensor flags_of(std::span<const KeySlice> slices, const Push& push);
  torch::Tensor payload_of(Server& server, SliceRange slices, const Push& push) const;
  void start_push_pull(Server& server, const Push& push);
  void put(Server& server, SliceRange slices, const Push& push) const;
  torch::Tensor two_bits_of(Server& server, SliceRange slices, const Push& push) const;
  void take(KeyRange keys, const DeviceTensors& into);
  bool any_trained(KeyRange keys) const;

  DistKVStoreOptions options_;
  DeviceSum sum_;
  std::vector<Server> servers_;
  bool in_parts_ = true;  // no update needs all gradients
  std::int64_t bytes_pushed_ = 0;
  std::int64_t bytes_pulled_ = 0;
};

}  // namespace lockstep
