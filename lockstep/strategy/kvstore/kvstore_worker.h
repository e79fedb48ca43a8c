// strategy/kvstore/kvstore_worker.h: one training step over a store: the same for every kind of store.
//
//   forward_backward  each device: forward and backward for its part of the batch, as towers do
//   update            push the gradients, then pull   the weights: the store has updated them
//                                                or   the gradients: every device updates itself
//
// Flow:    Batch -> towers.h -> KVStore -> the devices' replicas
// Owns:    the devices' threads, a replica per device, the store
// Threads: one scheduling thread
// Ranks:   local: one process; otherwise a worker
#pragma once

#include <memory>

#include "lockstep/kvstore.h"
#include "lockstep/strategy/devices/replica.h"

namespace lockstep {

class KVStoreWorker : public Strategy {
 public:
  BatchTotals forward_backward(const Batch& batch) override;
  void update() override;
  torch::Tensor forward(const torch::Tensor& data) override { return replicas_.front().forward(task_, data); }
  torch::nn::Module& model() override { return *replicas_.front().model; }
  Optimizer& optimizer() override { return *replicas_.front().optimizer; }
  const PhaseTimes& phases() const override { return phases_; }
  std::vector<std::string> devices() const override { return devices_.names(); }

 protected:
  KVStoreWorker(const World& world, const Task& task, const StrategyOptions& options, bool update_in_store);

  virtual KVStore& store() = 0;
  virtual BatchTotals over_workers(const BatchTotals& own) = 0;
  virtual void before_step() {}                                 // the weights are about to be used
  virtual void push_buffers(const PushOptions& /*options*/) {}  // what is no parameter
  virtual DeviceTensors gradients();

  bool update_in_store() const { return update_in_store_; }
  Devices& threads() { return devices_; }
  const Replicas& replicas() const { return replicas_; }
  KeyRange trained_keys() const { return {0, static_cast<std::int64_t>(parameters_.front().size())}; }
  const DeviceTensors& parameters() const { return parameters_; }  // those that are trained
  void pull_weights();

 private:
  void pull_buffers();
  PushOptions push_options() const;

  Task task_;
  Devices devices_;
  Replicas replicas_;
  DeviceTensors parameters_;
  DeviceTensors buffers_;
  bool update_in_store_;
  BatchTotals last_;  // of this worker
  PhaseTimes phases_;
};

// The parameters that are trained, and the buffers, by name: the keys of a store.
std::vector<NamedTensor> trained_parameters(const torch::nn::Module& model);

std::unique_ptr<Strategy> make_local_kvstore(const World& world, const Task& task, const StrategyOptions& options);

}  // namespace lockstep
