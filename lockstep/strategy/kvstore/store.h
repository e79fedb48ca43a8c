// SPDX-License-Identifier: Apache-2.0
// strategy/kvstore/store.h: what all stores have in common: keys by number instead of name, and the sum over the devices
// of one worker (level 1).
//
// Flow:    lockstep/kvstore.h -> here -> local_store.h, worker.cc
// Owns:    the list of keys, buffers for sums on the CPU
// Threads: one thread
// Ranks:   as lockstep/kvstore.h
#pragma once

#include <map>

#include "lockstep/kvstore.h"
#include "lockstep/step/parallel_for.h"
#include "lockstep/step/update/mean.h"
#include "lockstep/strategy/kvstore/key_plan.h"

namespace lockstep {

struct DistSetting;

// The keys of a store, in their order: values that are trained, then buffers.
std::vector<Key> keys_of(const NamedTensors& values, const NamedTensors& buffers);

// into = sum of the terms, in one pass over memory. `into`: dense; the terms have its dtype and number of elements.
void weighted_sum_into(const Tensor& into, std::span<const Term> terms, const ParallelFor& parallel_for = on_own_cores);

class Store : public KVStore {
 public:
  void init(const NamedTensors& values, const NamedTensors& buffers = {}) final;
  void push(const Names& names, const DeviceTensors& values, const PushOptions& options = {}) final;
  void pull(const Names& names, const DeviceTensors& into) final;
  void push_pull(const Names& names, const DeviceTensors& values, const DeviceTensors& into,
                 const PushOptions& options = {}) final;
  Tensor row_sparse_pull(const std::string& name, const Tensor& rows) final;

  // The same for neighbouring keys: what a strategy calls in each step.
  virtual void push(KeyRange keys, const DeviceTensors& values, const PushOptions& options) = 0;
  virtual void pull(KeyRange keys, const DeviceTensors& into) = 0;
  virtual void push_pull(KeyRange keys, const DeviceTensors& values, const DeviceTensors& into,
                         const PushOptions& options);

  int64_t bytes_pushed() const final { return bytes_pushed_; }
  int64_t bytes_pulled() const final { return bytes_pulled_; }
  const std::vector<Key>& keys() const { return keys_; }
  const std::string& key_name(size_t key) const { return names_[key]; }

 protected:
  // `devices`: they add up and copy. Null: the calling thread and its cores do. sums_on_device: on the first of them, not into
  // the store's own memory.
  explicit Store(Devices* devices, bool sums_on_device = false) : devices_(devices), sums_on_device_(sums_on_device) {}

  bool sums_on_device() const { return sums_on_device_; }

  // Values of GPUs that are summed on the CPU, copied to pinned memory of the host; other values as they are. Valid until the
  // next call for the same keys. Blocks.
  DeviceTensors on_host(const DeviceTensors& values, size_t first_key);

  // Sums over devices, key by key, in the order of the devices; with one device its own tensors. first_key: number of
  // the first key. Valid until the next sum of the same keys. Blocks. Throws what Devices::run() throws.
  Tensors sum(const DeviceTensors& values, size_t first_key);

  // Calls call(0) ... call(count - 1), each on its device where there are threads for them. Blocks until all are done.
  template <class Call>
  void on_every_device(size_t count, const Call& call) {
    if (devices_ == nullptr || count == 1)
      for (size_t device = 0; device < count; ++device) call(device);
    else
      devices_->run([call](Device& device) { call(device.index()); });
  }

  int64_t bytes_pushed_ = 0;
  int64_t bytes_pulled_ = 0;

  virtual void create(const Tensors& values) = 0;                // keys() are known
  virtual Tensor pull_rows(size_t key, const Tensor& rows) = 0;  // (rows, elements of a row)

 private:
  Tensors sum_on_cpu(const DeviceTensors& values, size_t first_key);
  size_t number_of(const std::string& name) const;
  void require_fitting(const Names& names, const DeviceTensors& tensors) const;
  void require_fitting(size_t key, const Tensor& tensor, int device) const;
  template <class Call>
  void for_each_range(const Names& names, std::initializer_list<const DeviceTensors*> tensors, const Call& call) const;

  Devices* devices_;
  bool sums_on_device_;
  Tensors buffers_;     // [key]
  DeviceTensors host_;  // [device][key]: copies of what GPUs push
  std::vector<Key> keys_;
  Names names_;                                // [key]
  std::vector<std::vector<int64_t>> sizes_{};  // [key]
  std::map<std::string, size_t> numbers_;      // by name
};

// A worker's store (worker.cc). devices: may be null, then the calling thread makes all copies. The store says goodbye
// at its end, but not while an exception is in flight, so that the servers notice that this worker is lost.
std::unique_ptr<Store> make_kv_worker(const DistSetting& setting, Devices* devices);

}  // namespace lockstep
