// lockstep/kvstore.h: a store of named values that devices push gradients to and pull weights from.
#pragma once

#include <cstdint>
#include <limits>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/error.h"
#include "lockstep/gradient/local_gradients.h"
#include "lockstep/model/parameters.h"
#include "lockstep/strategy.h"
#include "lockstep/strategy/kvstore/device_sum.h"
#include "lockstep/strategy/kvstore/key_plan.h"
#include "lockstep/strategy/kvstore/messages.h"
#include "lockstep/strategy/kvstore/server.h"

// ---- a store of named values that devices push gradients to and pull weights from: on one
// machine (local_kvstore.h), or on servers (dist_kvstore.h). S2.
//
//   init -> [set_optimizer] -> push, pull, push, pull, ...
//
// A push adds the values of this worker's devices (level 1). Where there are several workers, theirs are merged
// (level 2): all of them for dist_sync, each on its own for dist_async and dist_bounded. Without an optimizer the
// merged value replaces what the store has; with one it is a gradient, and the store updates.
//
// Flow:    strategy/kvstore/kvstore_worker.h, or a user's loop -> here -> optimizer/
// Owns:    the values, the optimizer's state
// Threads: one thread
// Ranks:   workers; servers run a KVServer (server.h)
//
// What several workers push is merged to the mean weighted by their samples, not to the sum: a learning rate means the
// same whatever their number.

namespace lockstep {

struct PushOptions {
  std::int64_t samples = 1;  // that the gradient is the mean of; 0: it does not count
  double loss = 0;           // their mean loss, for the servers' reports
  double learning_rate = std::numeric_limits<double>::quiet_NaN();  // of the update; NaN: the optimizer's own
};

class KVStore {
 public:
  virtual ~KVStore() = default;

  // Once, before anything else: the keys, in this order, and their first values, which are copied. `plain` ones are
  // replaced by what is pushed even where there is an optimizer. Between processes: every worker calls it with the same
  // names and shapes, the first worker's values count, and it blocks until they are there.
  // Throws UsageError: twice, or one name twice. MismatchError: workers that differ.
  void init(const std::vector<NamedTensor>& values, const std::vector<NamedTensor>& plain = {});

  // From now on pushed values are gradients. Of `options` only what is about the optimizer counts. Every worker calls
  // it.
  virtual void set_optimizer(const StrategyOptions& options) = 0;

  // values: [device][key], like the keys of `names`. Throw UsageError (an unknown name), PeerLost.
  void push(const std::vector<std::string>& names, const DeviceTensors& values, const PushOptions& options = {});
  void pull(const std::vector<std::string>& names, const DeviceTensors& into);
  void push_pull(const std::vector<std::string>& names, const DeviceTensors& values, const DeviceTensors& into,
                 const PushOptions& options = {});

  // The same for keys that follow each other.
  virtual void push(KeyRange keys, const DeviceTensors& values, const PushOptions& options) = 0;
  virtual void pull(KeyRange keys, const DeviceTensors& into) = 0;
  virtual void push_pull(KeyRange keys, const DeviceTensors& values, const DeviceTensors& into,
                         const PushOptions& options);

  // Rows of a key, by number: shape (rows, ...). Sends these rows only.
  virtual torch::Tensor row_sparse_pull(const std::string& name, const torch::Tensor& rows) = 0;

  const std::vector<Key>& keys() const { return keys_; }

 protected:
  virtual void create(const std::vector<torch::Tensor>& values) = 0;  // keys() are set
  std::int64_t number_of(const std::string& name) const;              // throws UsageError
  const torch::Tensor& like(std::int64_t key) const { return like_[static_cast<std::size_t>(key)]; }

 private:
  std::vector<Key> keys_;
  std::vector<torch::Tensor> like_;  // shape and layout of each key's values
};

// Throws UsageError unless every row is one of `key`'s.
void require_rows(const Key& key, const torch::Tensor& rows);

}  // namespace lockstep

// ---- a store for the devices of one process.
//
//   kind                     gradients summed on   update done on              suits
//   local_update_cpu         CPU                   CPU (the store)             many small weights
//   local_allreduce_cpu      CPU                   every device (not here)     large weights
//   local_allreduce_device   device 0              every device (not here)     peer-to-peer links, large gradients
//
// S2. Memory: a copy of the values, on the CPU; without an optimizer one of what is pushed, too. With one, what the
// devices push is added up in the pass that updates.

namespace lockstep {

class LocalKVStore : public KVStore {
 public:
  // devices: those that pull; null: all copies and updates are made by the calling thread and its cores.
  LocalKVStore(SumOn where, Devices* devices)
      : sum_(where, devices),
        gradients_(std::make_shared<LocalGradients>(devices ? ParallelFor(on_all(*devices)) : on_own_cores)) {}

  void set_optimizer(const StrategyOptions& options) override;
  using KVStore::pull;
  using KVStore::push;
  using KVStore::push_pull;
  void push(KeyRange keys, const DeviceTensors& values, const PushOptions& options) override;
  void pull(KeyRange keys, const DeviceTensors& into) override;
  torch::Tensor row_sparse_pull(const std::string& name, const torch::Tensor& rows) override;

  // Values as the store has them, and their optimizer: none before set_optimizer().
  const std::vector<torch::Tensor>& values() const { return values_; }
  const std::shared_ptr<Optimizer>& optimizer() const { return optimizer_; }

 protected:
  void create(const std::vector<torch::Tensor>& values) override;

 private:
  void update(KeyRange keys, const DeviceTensors& values, double learning_rate);
  void replace(std::int64_t key, KeyRange keys, const DeviceTensors& values);

  DeviceSum sum_;
  std::vector<torch::Tensor> values_;
  std::shared_ptr<Optimizer> optimizer_;
  std::shared_ptr<LocalGradients> gradients_;
};

// local_update_cpu, local_allreduce_cpu or local_allreduce_device, and why: what `local` chooses.
struct ChosenKind {
  KVStoreKind kind;
  std::string reason;
};
ChosenKind choose_local_kind(const std::vector<NamedTensor>& parameters, int devices, torch::Device where);

}  // namespace lockstep

// ---- a worker's side of a store on servers. S2.
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
