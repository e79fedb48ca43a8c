// SPDX-License-Identifier: Apache-2.0
// strategy/kvstore/store_strategy.h: one training step over a store, the same for every kind.
//
//   forward_backward  each device: forward and backward for its part of the batch, as towers do
//   update            push the gradients, then pull the weights (the store has updated them)
//                                              or the merged gradients (every device updates)
//
// Flow:    Batch -> towers.h -> Store -> the devices' replicas
// Owns:    the devices' threads, a replica per device, the store
// Threads: one scheduling thread
// Ranks:   local kinds: one process; dist_*: a worker. Servers have a strategy of their own (server_strategy.cc)
#pragma once

#include <memory>

#include "lockstep/strategy/devices/replica_strategy.h"
#include "lockstep/strategy/kvstore/link.h"
#include "lockstep/strategy/kvstore/store.h"

namespace lockstep {

class StoreStrategy : public ReplicaStrategy {
 public:
  BatchTotals forward_backward(const Batch& batch) override;
  void update() override;

 protected:
  StoreStrategy(const World& world, const Task& task, const StrategyOptions& options, bool update_in_store);

  virtual Store& store() = 0;
  virtual BatchTotals over_workers(const BatchTotals& own) = 0;  // of the global batch
  virtual void before_step() {}                                  // the weights are about to be used
  virtual void before_push(const PushOptions& /*options*/) {}

  KeyRange trained_keys() const { return {0, parameters_.front().size()}; }
  KeyRange buffer_keys() { return {trained_keys().last, store().keys().size()}; }  // none in a local store
  void pull_weights();

  DeviceTensors parameters_;  // those that are trained
  DeviceTensors buffers_;
  bool update_in_store_;

 private:
  PushOptions push_options() const;

  BatchTotals last_;  // of this worker
};

// The keys of a store: the parameters that are trained, then the buffers.
std::vector<NamedTensor> trained_parameters(const torch::nn::Module& model);
std::vector<torch::Tensor> tensors_of(const std::vector<NamedTensor>& named);

// dist_*: servers and workers go through the same training loop. A worker trains on its part of the batches. A server's
// threads serve; its loop counts a step once every worker has pushed it, validates and saves.
std::unique_ptr<Strategy> make_local_strategy(const World& world, const Task& task, const StrategyOptions& options);

// workers: the world of all workers.
std::unique_ptr<Strategy> make_worker_strategy(const DistSetting& setting, const World& workers, const Task& task);
std::unique_ptr<Strategy> make_server_strategy(const DistSetting& setting, const Task& task);

}  // namespace lockstep
