// SPDX-License-Identifier: Apache-2.0
// strategy/kvstore/local_store.h: a store for the devices of one process.
//
// Memory: a copy of the values on the CPU; without an optimizer also one of what is pushed. With an optimizer the pass
// that updates also sums over the devices: no sum is stored.
//
// Flow:    lockstep/kvstore.h -> here -> step/update/
// Owns:    the values, the optimizer
// Threads: one scheduling thread
// Ranks:   one process
#pragma once

#include <optional>

#include "lockstep/step/local_gradients.h"
#include "lockstep/strategy/kvstore/store.h"

namespace lockstep {

class LocalStore : public Store {
 public:
  // `devices`: those that pull; null: all copies and updates are made by the calling thread and its cores.
  LocalStore(KVStoreKind kind, Devices* devices)
      : Store(devices, kind == KVStoreKind::kLocalAllReduceDevice && devices != nullptr),
        gradients_(std::make_shared<LocalGradients>(devices ? ParallelFor(on_all(*devices)) : on_own_cores)) {}

  void set_optimizer(const UpdateOptions& options) override;
  using Store::pull;
  using Store::push;
  void push(KeyRange keys, const DeviceTensors& values, const PushOptions& options) override;
  void pull(KeyRange keys, const DeviceTensors& into) override;

  // The stored values, and their optimizer: null before set_optimizer().
  const Tensors& values() const { return values_; }
  const std::shared_ptr<Optimizer>& optimizer() const { return optimizer_; }

 protected:
  void create(const Tensors& values) override;
  Tensor pull_rows(size_t key, const Tensor& rows) override { return values_[key].index_select(0, rows); }

 private:
  void update(KeyRange keys, DeviceTensors& values, double learning_rate);

  Tensors values_;
  std::shared_ptr<Optimizer> optimizer_;
  std::shared_ptr<LocalGradients> gradients_;
};

// Two of these GPUs that don't reach each other's memory: "cuda:0 and cuda:2"; "": all do.
std::string not_linked(const std::vector<torch::Device>& gpus);

// local_update_cpu, local_allreduce_cpu or local_allreduce_device, and why: what `--kvstore local` chooses. separate: GPUs'
// not_linked(); none: the devices are cores.
struct ChosenKind {
  KVStoreKind kind;
  std::string reason;
};
ChosenKind choose_local_kind(const NamedTensors& parameters, int devices,
                             const std::optional<std::string>& separate = std::nullopt);

}  // namespace lockstep
