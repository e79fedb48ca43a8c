// strategy/kvstore/kvstore.h: a store of named values that devices push gradients to and pull weights from: on one
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
#pragma once

#include <cstdint>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "lockstep/model/parameters.h"
#include "lockstep/strategy/kvstore/device_sum.h"
#include "lockstep/strategy/kvstore/key_plan.h"
#include "lockstep/strategy/strategy.h"

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
