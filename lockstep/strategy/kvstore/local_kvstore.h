// strategy/kvstore/local_kvstore.h: a store for the devices of one process.
//
//   kind                     gradients summed on   update done on              suits
//   local_update_cpu         CPU                   CPU (the store)             many small weights
//   local_allreduce_cpu      CPU                   every device (not here)     large weights
//   local_allreduce_device   device 0              every device (not here)     peer-to-peer links, large gradients
//
// S2. Memory: a copy of the values, on the CPU; without an optimizer one of what is pushed, too. With one, what the
// devices push is added up in the pass that updates.
#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/gradient/step_gradients.h"
#include "lockstep/strategy/kvstore/kvstore.h"

namespace lockstep {

class LocalKVStore : public KVStore {
 public:
  // devices: those that pull; null: all copies and updates are made by the calling thread and its cores.
  LocalKVStore(SumOn where, Devices* devices)
      : sum_(where, devices),
        gradients_(std::make_shared<SummedGradients>(devices ? ParallelFor(on_all(*devices)) : on_own_cores)) {}

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
  std::shared_ptr<SummedGradients> gradients_;
};

// local_update_cpu, local_allreduce_cpu or local_allreduce_device, and why: what `local` chooses.
struct ChosenKind {
  std::string kind;
  std::string reason;
};
ChosenKind choose_local_kind(const std::vector<NamedTensor>& parameters, int devices, torch::Device where);

}  // namespace lockstep
