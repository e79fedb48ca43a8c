#include "lockstep/strategy/kvstore/kvstore_worker.h"

#include "lockstep/deadline.h"
#include "lockstep/model/parameters.h"

namespace lockstep {
namespace {

std::vector<torch::Tensor> tensors_of(const std::vector<NamedTensor>& named) {
  std::vector<torch::Tensor> tensors;
  for (const auto& [name, tensor] : named) tensors.push_back(tensor);
  return tensors;
}

}  // namespace

std::vector<NamedTensor> trained_parameters(const torch::nn::Module& model) {
  std::vector<NamedTensor> parameters = named_parameters(model);
  std::erase_if(parameters, [](const NamedTensor& each) { return !each.tensor.requires_grad(); });
  return parameters;
}

KVStoreWorker::KVStoreWorker(const World& world, const Task& task, const StrategyOptions& options, bool update_in_store)
    : task_(task),
      devices_({.count = options.devices, .cores = world.cores(), .timeout = options.timeout}),
      replicas_(make_replicas(options.devices, task, options)),
      update_in_store_(update_in_store) {
  for (const Replica& replica : replicas_) {
    parameters_.push_back(tensors_of(trained_parameters(*replica.model)));
    buffers_.push_back(tensors_of(named_buffers(*replica.model)));
  }
}

BatchTotals KVStoreWorker::forward_backward(const Batch& batch) {
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

void KVStoreWorker::update() {
  Stopwatch watch;
  const DeviceTensors pushed = gradients();
  push_buffers(push_options());
  store().push_pull(trained_keys(), pushed, update_in_store_ ? parameters_ : pushed, push_options());
  if (update_in_store_) pull_buffers();
  phases_.exchange += watch.seconds();
  if (update_in_store_) return;
  watch = Stopwatch();
  follow_learning_rate(replicas_);
  lockstep::update(devices_, replicas_);
  phases_.update += watch.seconds();
}

PushOptions KVStoreWorker::push_options() const {
  return {.samples = last_.samples,
          .loss = last_.mean_loss,
          .learning_rate = replicas_.front().optimizer->param_groups().front().options().get_lr()};
}

void KVStoreWorker::pull_weights() {
  store().pull(trained_keys(), parameters_);
  pull_buffers();
}

// A local store has none.
void KVStoreWorker::pull_buffers() {
  const KeyRange keys{trained_keys().last, static_cast<std::int64_t>(store().keys().size())};
  if (keys.size() > 0) store().pull(keys, buffers_);
}

// Each key's on every device, or on none.
DeviceTensors KVStoreWorker::gradients() {
  static_cast<void>(with_gradients(parameters_));
  return gradients_of(parameters_);
}

}  // namespace lockstep
