// SPDX-License-Identifier: Apache-2.0
#include "lockstep/strategy/devices/data_parallel.h"

#include <algorithm>

#include "lockstep/strategy/devices/replica_strategy.h"
#include "lockstep/strategy/devices/thread_generator.h"

namespace lockstep {
namespace {

// Each device's part of a tensor over the whole batch.
Tensors scatter(const torch::Tensor& whole, int devices) {
  Tensors parts;
  for (const Batch& part : parts_of({whole, whole}, devices)) parts.push_back(part.data);
  return parts;
}

Tensors parallel_apply(Devices& devices, const Task& task, const Replicas& replicas, const Tensors& inputs) {
  const auto outputs = std::make_shared<Tensors>(inputs.size());
  devices.run([outputs, task, replicas, inputs, seed = draw_seed()](Device& device) {
    const Replica& replica = for_device(replicas, device);
    const torch::Tensor& input = for_device(inputs, device);
    replica.optimizer->zero_grad();
    device.seed(seed_of(seed, device.index()));
    if (input.size(0) > 0) for_device(*outputs, device) = replica.forward(task, input);
  });
  return *outputs;
}

// A new leaf: each device's graph ends at its own outputs.
torch::Tensor gather(const Tensors& outputs) {
  Tensors defined;
  for (const torch::Tensor& output : outputs)
    if (output.defined()) defined.push_back(output.detach());
  return torch::cat(defined).requires_grad_();
}

struct Loss {
  double value = 0;
  torch::Tensor gradient;  // of the gathered outputs
};

Loss loss_on_device_0(Devices& devices, const Task& task, const torch::Tensor& gathered, const torch::Tensor& target) {
  const auto found = std::make_shared<Loss>();
  devices.run_on(0, [found, task, gathered, target](Device&) {
    const torch::Tensor loss = task.loss(gathered, target);
    loss.backward();
    *found = {loss.item<double>(), gathered.grad()};
  });
  return *found;
}

void parallel_backward(Devices& devices, const Tensors& outputs, const Tensors& gradients) {
  devices.run([outputs, gradients](Device& device) {
    const torch::Tensor& output = for_device(outputs, device);
    if (output.defined()) output.backward(for_device(gradients, device));
  });
}

class DataParallel : public ReplicaStrategy {
 public:
  DataParallel(const World& world, const Task& task, const StrategyOptions& options)
      : ReplicaStrategy(task, make_replicas(options.devices, task, options), make_devices(world, options)),
        gradients_(share_parameters(*devices_, replicas_)) {  // replicates once and for all
    seed_steps(options.seed + 1);
  }

  BatchTotals forward_backward(const Batch& batch) override {
    const int devices = devices_->size();
    Tensors outputs;
    const Loss loss = timed(phases_.forward, [&] {
      outputs = parallel_apply(*devices_, task_, replicas_, scatter(batch.data, devices));
      const torch::Tensor gathered = gather(outputs);
      gathered_bytes_ = std::max(gathered_bytes_, static_cast<std::int64_t>(gathered.nbytes()));
      return loss_on_device_0(*devices_, task_, gathered, batch.target);
    });
    timed(phases_.backward, [&] { parallel_backward(*devices_, outputs, scatter(loss.gradient, devices)); });
    return {.samples = batch.size(), .mean_loss = loss.value};
  }

  // Device 0's parameters, in one pass that also sums the devices' gradients, on the cores of all of them.
  void update() override {
    timed(phases_.update, [&] {
      gradients_->set(gradients_of(replicas_));
      optimizer().step();
    });
  }

  void restored(std::int64_t) override { follow_model(replicas_); }

  // Every device holds gradients. Device 0 also holds the parameters, the optimizer's state, and the gathered outputs
  // with their gradient.
  Report report() const override {
    const auto gradients = static_cast<double>(gradient_bytes(*replicas_.front().model));
    const double alone = static_cast<double>(parameter_bytes(*replicas_.front().model) +
                                             optimizer_bytes(replicas_.front()) + 2 * gathered_bytes_);
    const auto busy = devices_->busy_seconds();
    double others = 0;
    for (std::size_t i = 1; i < busy.size(); ++i) others += busy[i];
    return {{"device_0_bytes", gradients + alone},
            {"other_device_bytes", gradients},
            {"device_0_busy_seconds", busy[0]},
            {"other_device_busy_seconds", busy.size() > 1 ? others / static_cast<double>(busy.size() - 1) : 0}};
  }

 private:
  std::shared_ptr<LocalGradients> gradients_;
  std::int64_t gathered_bytes_ = 0;
};

}  // namespace

std::unique_ptr<Strategy> make_data_parallel(const World& world, const Task& task, const StrategyOptions& options) {
  require_one_process(world, options);
  return std::make_unique<DataParallel>(world, task, options);
}

}  // namespace lockstep
