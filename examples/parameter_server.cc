// SPDX-License-Identifier: Apache-2.0
// A two-level parameter server in its kinds: `local` sums over the devices of one worker, and the store or every device
// updates; `dist_sync` takes the mean over workers; `dist_async` updates with each gradient as it arrives.
// docs/five-systems.md has a picture.
#include <iostream>
#include <stdexcept>

#include <lockstep/lockstep.h>
#include <torch/types.h>

namespace {

constexpr int64_t kBatch = 60, kInputs = 8;  // samples of all workers and devices together
constexpr int kSteps = 40;
constexpr double kLearningRate = 0.1;

torch::Tensor truth() { return torch::arange(1, kInputs + 1, torch::kFloat64); }

// The gradient of samples [begin, begin + size) of the batch: of their mean loss for a linear model.
torch::Tensor gradient_of(const torch::Tensor& weight, const lockstep::Range& part) {
  torch::manual_seed(1);
  const auto inputs = torch::randn({kBatch, kInputs}, torch::kFloat64);
  const auto targets = inputs.mv(truth());
  const auto errors = (inputs.mv(weight) - targets).slice(0, part.begin, part.end);
  return inputs.slice(0, part.begin, part.end).t().mv(errors) * 2 / part.size();
}

// What one device computes with the whole batch.
torch::Tensor on_one_device() {
  auto weight = torch::zeros({kInputs}, torch::kFloat64);
  for (int step = 0; step < kSteps; ++step) weight -= kLearningRate * gradient_of(weight, {0, kBatch});
  return weight;
}

// One worker with some devices: pushes their gradients, pulls weights, or the gradients' sum where devices update.
torch::Tensor train(lockstep::KVStore& store, int worker, int workers, size_t devices, bool store_updates) {
  lockstep::DeviceTensors weights(devices), gradients(devices);
  for (auto& each : weights) each = {torch::zeros({kInputs}, torch::kFloat64)};
  store.init({{"weight", weights[0][0]}});
  if (store_updates) store.set_optimizer({.optimizer = lockstep::SGDOptions{.lr = kLearningRate}});
  const auto mine = lockstep::even_part(kBatch, worker, workers);
  for (int step = 0; step < kSteps; ++step) {
    for (size_t device = 0; device < devices; ++device) {  // each its part of the worker's part
      auto part = lockstep::even_part(mine.size(), static_cast<int>(device), static_cast<int>(devices));
      const double share = static_cast<double>(part.size()) / static_cast<double>(mine.size());
      part = {mine.begin + part.begin, mine.begin + part.end};
      gradients[device] = {gradient_of(weights[device][0], part) * share};
    }
    store.push({"weight"}, gradients, {.samples = mine.size()});
    store.pull({"weight"}, store_updates ? weights : gradients);
    for (size_t i = 0; !store_updates && i < devices; ++i) weights[i][0] -= kLearningRate * gradients[i][0];
  }
  return weights.back()[0];
}

// The weights have to be those of one device; but dist_async applies gradients of older weights, and has to learn.
void check(const std::string& kind, const torch::Tensor& weight) {
  const double difference = (weight - on_one_device()).abs().max().item<double>();
  std::cout << kind << ": differs from one device by " << difference << std::endl;
  const bool learned = ((weight - truth()).norm() < truth().norm() / 2).item<bool>();
  if (!learned || (kind != "dist_async" && difference > 1e-9)) throw std::runtime_error(kind + " computes nonsense");
}

}  // namespace

int main() try {
  for (const std::string kind : {"dist_sync", "dist_async"})
    lockstep::spawn(3, [kind](lockstep::World& world) {
      const auto store = lockstep::KVStore::create(kind, world);
      if (!store) return;  // rank 0 was the server, until both workers had gone
      check(kind, train(*store, world.rank() - 1, world.size() - 1, 1, true));
    });
  lockstep::Devices devices({.count = 2});
  for (const std::string kind : {"local_update_cpu", "local_allreduce_cpu", "local_allreduce_device"})
    check(kind, train(*lockstep::KVStore::create(kind, {}, &devices), 0, 1, 2, kind == "local_update_cpu"));
} catch (const std::exception& error) {
  std::cerr << error.what() << std::endl;
  return 1;
}
