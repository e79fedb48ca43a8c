// SPDX-License-Identifier: Apache-2.0
#include "lockstep/strategy/kvstore/store_strategy.h"

#include "lockstep/model/parameters.h"

namespace lockstep {

std::vector<torch::Tensor> tensors_of(const std::vector<NamedTensor>& named) {
  std::vector<torch::Tensor> tensors;
  for (const auto& [name, tensor] : named) tensors.push_back(tensor);
  return tensors;
}

std::vector<NamedTensor> trained_parameters(const torch::nn::Module& model) {
  std::vector<NamedTensor> parameters = named_parameters(model);
  std::erase_if(parameters, [](const NamedTensor& each) { return !each.tensor.requires_grad(); });
  return parameters;
}

StoreStrategy::StoreStrategy(const World& world, const Task& task, const StrategyOptions& options, bool update_in_store)
    : ReplicaStrategy(task, make_replicas(options.devices, task, options), make_devices(world, options)),
      update_in_store_(update_in_store) {
  for (const Replica& replica : replicas_) {
    parameters_.push_back(tensors_of(trained_parameters(*replica.model)));
    buffers_.push_back(tensors_of(named_buffers(*replica.model)));
  }
}

BatchTotals StoreStrategy::forward_backward(const Batch& batch) {
  before_step();
  const auto shards = split_and_load(batch, *devices_);
  const auto losses = timed(phases_.forward, [&] { return tower_losses(*devices_, task_, replicas_, shards); });
  timed(phases_.backward, [&] { backward(*devices_, losses, shards); });
  last_ = mean_of(losses, shards);
  return over_workers(last_);
}

// A key has a gradient on every device, or on none.
void StoreStrategy::update() {
  timed(phases_.exchange, [&] {
    before_push(push_options());
    static_cast<void>(with_gradients(parameters_));
    const DeviceTensors gradients = gradients_of(parameters_);
    store().push_pull(trained_keys(), gradients, update_in_store_ ? parameters_ : gradients, push_options());
    if (update_in_store_ && buffer_keys().size() > 0) store().pull(buffer_keys(), buffers_);
  });
  if (update_in_store_) return;
  timed(phases_.update, [&] {
    follow_learning_rate(replicas_);
    lockstep::update(*devices_, replicas_);
  });
}

PushOptions StoreStrategy::push_options() const {
  return {.samples = last_.samples,
          .loss = last_.mean_loss,
          .learning_rate = replicas_.front().optimizer->param_groups().front().options().get_lr()};
}

void StoreStrategy::pull_weights() {
  store().pull(trained_keys(), parameters_);
  if (buffer_keys().size() > 0) store().pull(buffer_keys(), buffers_);
}

}  // namespace lockstep
