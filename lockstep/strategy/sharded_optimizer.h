// strategy/sharded_optimizer.h: one optimizer whose parameters are shared out over the devices: each updates its own.
//
// Flow:    gradients on one replica -> step() -> the devices' threads update that replica's parameters
// Owns:    an optimizer per device
// Threads: the scheduling thread of the devices
// Ranks:   inside one process
#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "lockstep/optimizer/optimizer.h"
#include "lockstep/strategy/devices.h"

namespace lockstep {

class ShardedOptimizer : public Optimizer {
 public:
  using Shards = std::vector<std::vector<torch::Tensor>>;  // of each device; none may be in two
  using MakeOptimizer = std::function<std::shared_ptr<Optimizer>(const std::vector<torch::Tensor>&)>;

  // `devices` must outlive it. The learning rate is that of `make`'s optimizers.
  ShardedOptimizer(Devices& devices, const Shards& shards, const MakeOptimizer& make);

  StateTensors state_of(const torch::Tensor& parameter) const override;
  void set_state(const torch::Tensor& parameter, const StateTensors& state) override;

 protected:
  void update(torch::optim::OptimizerParamGroup& group, const std::vector<torch::Tensor>& parameters) override;

 private:
  std::size_t shard_of(const torch::Tensor& parameter) const;

  Devices& devices_;
  std::vector<std::shared_ptr<Optimizer>> optimizers_;  // none for a device without parameters
};

// The parameters in as many lists, each about as large as the others: always the next larger one to the smallest list.
ShardedOptimizer::Shards even_shards(const std::vector<torch::Tensor>& parameters, int shards);

}  // namespace lockstep
