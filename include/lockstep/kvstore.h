// SPDX-License-Identifier: Apache-2.0
// lockstep/kvstore.h: a store of named tensors: devices push gradients to it and pull weights from it.
//
//   init -> [set_optimizer] -> push, pull, push, pull, ...
//
// A push is summed over the devices of its worker (level 1) and merged with what other workers push (level 2): the mean
// weighted by samples over all workers for dist_sync, each push by itself for dist_async and dist_bounded. (MXNet's
// KVStore adds up what workers push; with the mean a learning rate does not depend on their number.) Without an
// optimizer the merged value replaces the stored one. With one it is a gradient, and the store updates.
//
//   kind                     gradients summed on   update done on              suits
//   local_update_cpu         CPU                   CPU (the store)             many small weights
//   local_allreduce_cpu      CPU                   every device (the caller)   large weights
//   local_allreduce_device   device 0              every device (the caller)   peer-to-peer links, large gradients
//   dist_sync                servers wait for all workers; one update for the batch of all of them
//   dist_async               servers update with each worker's gradient as it arrives: with its share of the learning
//                            rate, by samples, and, but for 16-bit values, an optimizer's state of its own. With
//                            several workers SGD's momentum is Nesterov's (Hakimi et al., 2019)
//   dist_bounded             the same, but no gradient gets older than `staleness` updates
//
// Flow:    strategy/kvstore/kvstore_strategy.cc, or a user's loop -> here -> optimizer
// Owns:    the stored values and the optimizer's state (dist_*: on the servers)
// Threads: one thread
// Ranks:   local kinds: one process. dist_*: one store per worker. dist_sync: every worker pushes the same keys in the same
//          order
//
// Notation: K bytes of the keys in a call, N workers, S servers. local: nothing is sent. dist_*: a push sends K and a
// pull receives K, spread over the servers; each server receives and sends N K / S. With 2-bit compression a push of
// float32 sends K / 16. Every call blocks until all servers have replied. It throws PeerLost if a server is lost, or
// has failed because another worker is; the store can't be used after that.
#pragma once

#include <limits>

#include "lockstep/strategy.h"

namespace lockstep {

// [device][key]. A key that is undefined on all devices has no value.
using DeviceTensors = std::vector<Tensors>;

struct PushOptions {
  int64_t samples = 1;  // that the gradient is the mean of: its weight; 0: it does not count
  double loss = 0;      // their mean loss, for the servers' reports
  double learning_rate = std::numeric_limits<double>::quiet_NaN();  // from this update on; NaN: as before
  int64_t examples = 0;  // that the samples are counted in, for reports; 0: as many as samples
};

// The optimizer of a store. Sent to servers as raw bytes.
struct UpdateOptions {
  OptimizerOptions optimizer{};
  ClippingOptions clipping{};
  double ema_decay = 0;  // 0: no moving average of the weights
};

// How old gradients were when servers applied them: the updates made with other gradients since their worker read the weights.
struct Delays {
  int64_t gradients = 0;  // one for each push and each server that has a part of it
  int64_t max = 0;
  double mean = 0;
};

class KVStore {
 public:
  using Names = std::vector<std::string>;

  virtual ~KVStore() = default;

  // A store of this kind: "local_update_cpu", "dist_sync" ... world: none: of local kinds one rank, of dist_* the ranks
  // of World::from_env(). Throws and returns as the other create(), and UsageError: no such kind.
  static std::unique_ptr<KVStore> create(const std::string& kind, std::optional<World> world = std::nullopt,
                                         Devices* devices = nullptr);

  // A store of the kind options.kvstore.kind. Of `options` only kvstore, compression and timeout count. devices: those
  // that push and pull; null: one, and the calling thread makes all copies.
  //
  // local kinds: `world` has one rank; `local` by itself is local_update_cpu. Throws UsageError.
  // dist_*: all ranks of `world` call it. Servers are those with kvstore.serves, or that `lockstep run --servers` has
  // started as servers; else the first kvstore.servers of them. For them it returns null once every worker has destroyed
  // its store. Throws UsageError (no worker, no server, invalid options), PeerLost.
  static std::unique_ptr<KVStore> create(const World& world, const StrategyOptions& options,
                                         Devices* devices = nullptr);

  // Once, before anything else: the keys in this order, and their first values, which are copied. A push replaces a
  // buffer even where there is an optimizer. dist_*: every worker calls it with the same names and shapes; the first
  // worker's values count. Throws UsageError (called twice, or a name twice), MismatchError (workers that differ).
  virtual void init(const NamedTensors& values, const NamedTensors& buffers = {}) = 0;

  // From now on pushed values are gradients. dist_*: every worker calls it, with the same options.
  virtual void set_optimizer(const UpdateOptions& options) = 0;

  // The values of `names`, on every device. push_pull is the same as push, then pull; with dist_sync it goes in parts:
  // some are pushed while others are merged and pulled. Throw UsageError, before anything is sent: an unknown name, another
  // shape or dtype than in init(), another number of devices; DeviceError. local_allreduce_device adds up in the first device's
  // tensors.
  virtual void push(const Names& names, const DeviceTensors& values, const PushOptions& options = {}) = 0;
  virtual void pull(const Names& names, const DeviceTensors& into) = 0;
  virtual void push_pull(const Names& names, const DeviceTensors& values, const DeviceTensors& into,
                         const PushOptions& options = {}) = 0;

  // Rows of a key's value, shape (rows, ...). rows: int64, (rows). Only these rows are sent. Throws UsageError.
  virtual Tensor row_sparse_pull(const std::string& name, const Tensor& rows) = 0;

  // This worker's number, and how many there are. Local kinds: 0 of 1.
  virtual int rank() const { return 0; }
  virtual int workers() const { return 1; }

  // Blocks until every worker has called it. Throws PeerLost.
  virtual void barrier() {}

  // Asks the servers for those of all workers' gradients until now. Local kinds: none.
  virtual Delays delays() { return {}; }

  // Bytes of values that this worker has sent to and received from servers. Local kinds: that devices have pushed, and that were
  // copied to them.
  virtual int64_t bytes_pushed() const = 0;
  virtual int64_t bytes_pulled() const = 0;
};

}  // namespace lockstep
