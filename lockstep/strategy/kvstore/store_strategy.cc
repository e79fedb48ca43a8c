#include "lockstep/strategy/kvstore/store_strategy.h"

#include "lockstep/deadline.h"
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

UpdateOptions update_options(const StrategyOptions& options) {
  return {.optimizer = options.optimizer, .clipping = options.clipping, .ema_decay = options.ema_decay};
}

StoreStrategy::StoreStrategy(const World& world, const Task& task, const StrategyOptions& options, bool update_in_store)
    : task_(task),
      devices_({.count = options.devices, .cores = world.cores(), .timeout = options.timeout}),
      replicas_(make_replicas(options.devices, task, options)),
      update_in_store_(update_in_store) {
  for (const Replica& replica : replicas_) {
    parameters_.push_back(tensors_of(trained_parameters(*replica.model)));
    buffers_.push_back(tensors_of(named_buffers(*replica.model)));
  }
}

BatchTotals StoreStrategy::forward_backward(const Batch& batch) {
  before_step();
  Stopwatch watch;
  const auto shards = split_and_load(batch, devices_);
  const auto losses = tower_losses(devices_, task_, replicas_, shards);
  phases_.forward += watch.seconds();
  watch = Stopwatch();
  backward(devices_, losses, shards);
  phases_.backward += watch.seconds();
  last_ = {};
  for (std::size_t i = 0; i < losses.size(); ++i)
    if (losses[i].defined()) last_.add(shards[i].size(), losses[i].item<double>());
  return over_workers(last_);
}

// A key has a gradient on every device, or on none.
void StoreStrategy::update() {
  Stopwatch watch;
  before_push(push_options());
  static_cast<void>(with_gradients(parameters_));
  const DeviceTensors gradients = gradients_of(parameters_);
  store().push_pull(trained_keys(), gradients, update_in_store_ ? parameters_ : gradients, push_options());
  if (update_in_store_ && buffer_keys().size() > 0) store().pull(buffer_keys(), buffers_);
  phases_.exchange += watch.seconds();
  if (update_in_store_) return;
  watch = Stopwatch();
  follow_learning_rate(replicas_);
  lockstep::update(devices_, replicas_);
  phases_.update += watch.seconds();
}

PushOptions StoreStrategy::push_options() const {
  const BatchTotals totals = last_.totals();
  return {.samples = totals.samples,
          .loss = totals.samples > 0 ? totals.mean_loss : 0,
          .learning_rate = replicas_.front().optimizer->param_groups().front().options().get_lr()};
}

void StoreStrategy::pull_weights() {
  store().pull(trained_keys(), parameters_);
  if (buffer_keys().size() > 0) store().pull(buffer_keys(), buffers_);
}

}  // namespace lockstep
