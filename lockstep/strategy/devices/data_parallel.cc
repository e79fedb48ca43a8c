#include "lockstep/strategy/devices/data_parallel.h"

#include <algorithm>

#include "lockstep/deadline.h"
#include "lockstep/error.h"
#include "lockstep/strategy/devices/thread_generator.h"
#include "lockstep/towers.h"

namespace lockstep {
namespace {

std::size_t place_of(const Device& device) { return static_cast<std::size_t>(device.index()); }

// The part of a tensor over the whole batch that belongs to each device.
Tensors scatter(const torch::Tensor& whole, int devices) {
  Tensors parts;
  for (const Batch& part : parts_of({whole, whole}, devices)) parts.push_back(part.data);
  return parts;
}

Tensors parallel_apply(Devices& devices, const Task& task, const Replicas& replicas, const Tensors& inputs) {
  const auto outputs = std::make_shared<Tensors>(inputs.size());
  devices.run([outputs, task, replicas, inputs, seed = draw_seed()](Device& device) {
    const std::size_t i = place_of(device);
    replicas[i].optimizer->zero_grad();
    device.seed(seed_of(seed, device.index()));
    if (inputs[i].size(0) > 0) (*outputs)[i] = replicas[i].forward(task, inputs[i]);
  });
  return *outputs;
}

// A leaf of its own: each device's graph ends at its outputs.
torch::Tensor gather(const Tensors& outputs) {
  Tensors there;
  for (const torch::Tensor& output : outputs)
    if (output.defined()) there.push_back(output.detach());
  return torch::cat(there).requires_grad_();
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
    const std::size_t i = place_of(device);
    if (outputs[i].defined()) outputs[i].backward(gradients[i]);
  });
}

class DataParallel : public Strategy {
 public:
  DataParallel(const World& world, const Task& task, const StrategyOptions& options)
      : task_(task),
        devices_({.count = options.devices, .cores = world.cores(), .timeout = options.timeout}),
        replicas_(make_replicas(options.devices, task, options)) {
    gradients_ = share_parameters(devices_, replicas_);  // replicate, once and for all: the devices share their memory
    seed_steps(options.seed + 1);
  }

  BatchTotals forward_backward(const Batch& batch) override {
    Stopwatch watch;
    const Tensors outputs = parallel_apply(devices_, task_, replicas_, scatter(batch.data, devices_.size()));
    const torch::Tensor gathered = gather(outputs);
    const Loss loss = loss_on_device_0(devices_, task_, gathered, batch.target);
    gathered_bytes_ = std::max(gathered_bytes_, static_cast<std::int64_t>(gathered.nbytes()));
    phases_.forward += watch.seconds();
    watch = Stopwatch();
    parallel_backward(devices_, outputs, scatter(loss.gradient, devices_.size()));
    phases_.backward += watch.seconds();
    return {.samples = batch.size(), .mean_loss = loss.value};
  }

  // Device 0's parameters, in one pass with the sum of what the devices have, on the cores of all of them.
  void update() override {
    const Stopwatch watch;
    gradients_->set(gradients_of(replicas_));
    replicas_.front().optimizer->step();
    phases_.update += watch.seconds();
  }

  torch::Tensor forward(const torch::Tensor& data) override { return replicas_.front().forward(task_, data); }
  torch::nn::Module& model() override { return *replicas_.front().model; }
  Optimizer& optimizer() override { return *replicas_.front().optimizer; }
  const PhaseTimes& phases() const override { return phases_; }
  void restored(std::int64_t) override { follow_model(replicas_); }
  std::vector<std::string> devices() const override { return devices_.names(); }

  // Device 0 holds what every device holds (gradients), and alone the parameters, the optimizer's state, and the
  // gathered outputs with their gradient.
  Report report() const override {
    const auto gradients = static_cast<double>(gradient_bytes(*replicas_.front().model));
    const double alone = static_cast<double>(parameter_bytes(*replicas_.front().model) +
                                             optimizer_bytes(replicas_.front()) + 2 * gathered_bytes_);
    const auto busy = devices_.busy_seconds();
    double others = 0;
    for (std::size_t i = 1; i < busy.size(); ++i) others += busy[i];
    return {{"device_0_bytes", gradients + alone},
            {"other_device_bytes", gradients},
            {"device_0_busy_seconds", busy[0]},
            {"other_device_busy_seconds", busy.size() > 1 ? others / static_cast<double>(busy.size() - 1) : 0}};
  }

 private:
  Task task_;
  Devices devices_;
  Replicas replicas_;
  std::shared_ptr<SummedGradients> gradients_;
  std::int64_t gathered_bytes_ = 0;
  PhaseTimes phases_;
};

}  // namespace

std::unique_ptr<Strategy> make_data_parallel(const World& world, const Task& task, const StrategyOptions& options) {
  require_one_process(world, options);
  return std::make_unique<DataParallel>(world, task, options);
}

}  // namespace lockstep
