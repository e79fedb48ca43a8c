// SPDX-License-Identifier: Apache-2.0
// `data_parallel`: a thread per device, one of them the master, as in torch's DataParallel. docs/strategies/data_parallel.md
// has the steps.
//
// Owns:    the devices' threads, a replica per device
// Threads: one scheduling thread
// Ranks:   inside one process
#include <ATen/core/grad_mode.h>
#include <c10/util/ScopeExit.h>

#include <algorithm>
#include <numeric>
#include <utility>
#include <vector>

#include "lockstep/data_parallel.h"
#include "lockstep/error.h"
#include "lockstep/model/parameters.h"
#include "lockstep/strategy/devices/replica_strategy.h"
#include "lockstep/strategy/strategies.h"

namespace lockstep {
namespace {

// Leaves the gradient of the gathered outputs in their .grad.
double loss_on_device_0(Devices& devices, const Task& task, const Tensor& gathered, const Batch& batch) {
  const auto value = std::make_shared<double>();
  devices.run([value, task, gathered, batch](Device& device) {
    if (device.index() != 0) return;
    const Tensor loss = task.loss(gathered, judged_on(device.where(), batch));
    loss.backward();
    *value = loss.item<double>();
  });
  return *value;
}

class DataParallelStrategy : public ReplicaStrategy {
 public:
  DataParallelStrategy(const World& world, const Task& task, const StrategyOptions& options)
      : ReplicaStrategy(world, task, options) {
    if (!devices_->on_gpus()) share_parameters(*devices_, replicas_);  // replicates once and for all
    seed_steps(options.seed);
  }

  BatchTotals forward_backward(const Batch& batch) override {
    const int64_t samples = samples_of(task_, batch);
    if (samples == 0) {  // the loss may be NaN
      for (const Replica& replica : replicas_) replica.optimizer->zero_grad();
      return {.examples = batch.size()};
    }
    Tensors outputs;
    Tensor gathered;
    const double loss = in_phase(Phase::kForward, [&] {
      outputs = run_replicas(*devices_, replicas_, parts_for_devices(batch),
                             [task = task_](const Replica& replica, const Batch& part, const Device&) {
                               return replica.forward(task, part);
                             });
      gathered = gather(outputs, devices_->where(0)).requires_grad_();
      gathered_bytes_ = std::max(gathered_bytes_, gathered.nbytes());
      return loss_on_device_0(*devices_, task_, gathered, batch);
    });
    gathered = gathered.grad();  // frees the outputs
    in_phase(Phase::kBackward, [&] { scatter_and_run_backward(*devices_, outputs, gathered); });
    return {.samples = samples, .mean_loss = loss, .examples = batch.size()};
  }

  // Device 0's parameters, in one pass that also sums the devices' gradients, on the cores of all of them. GPUs: the
  // gradients are summed on device 0, which updates; its parameters are copied to the others.
  void update() override {
    in_phase(Phase::kUpdate, [&] {
      if (devices_->on_gpus()) return update_on_gpus();
      combine_gradients(replicas_);
      optimizer().step();
    });
  }

  void restored(int64_t) override { follow_model(replicas_); }

  // Every device holds gradients, a GPU parameters too. Device 0 also holds the parameters, the optimizer's state, and
  // the gathered outputs with their gradient.
  Report report() const override {
    const Replica& first = replicas_.front();
    size_t gradients = 0, alone = 2 * gathered_bytes_;
    for (const auto& [name, parameter] : named_parameters(*first.model)) {
      (devices_->on_gpus() ? gradients : alone) += parameter.nbytes();
      if (parameter.grad().defined()) gradients += parameter.grad().nbytes();
      for (const auto& [key, state] : first.optimizer->state_of(parameter))
        if (state.dim() > 0) alone += state.nbytes();  // without the number of steps
    }
    const auto busy = devices_->busy_seconds();
    const double others = std::accumulate(busy.begin() + 1, busy.end(), 0.0);
    return {{"device_0_bytes", gradients + alone},
            {"other_device_bytes", gradients},
            {"device_0_busy_seconds", busy[0]},
            {"other_device_busy_seconds", busy.size() > 1 ? others / to_double(busy.size() - 1) : 0}};
  }

 private:
  void update_on_gpus() {
    const DeviceTensors updated = with_gradients(parameters_of(replicas_));
    devices_->run([updated, replicas = replicas_](Device& device) {
      for (const Tensor& parameter : for_device(updated, device)) device.reduce(parameter.grad());
      if (device.index() == 0) replicas.front().optimizer->step();
      for (const Tensor& parameter : for_device(updated, device)) device.broadcast(parameter.detach());
    });
  }

  size_t gathered_bytes_ = 0;
};

}  // namespace

// The devices share parameters and state.
HeldBytes bytes_of_data_parallel(const PlannedRun& run) {
  return {.processes = run.process,
          .parameters = run.parameters,
          .state = run.state,
          .gradients = run.devices * run.parameters,
          .activations = run.activations};
}

std::unique_ptr<Strategy> make_data_parallel(const World& world, const Task& task, const StrategyOptions& options) {
  require_one_process(world, options);
  return std::make_unique<DataParallelStrategy>(world, task, options);
}

// ---- The module (lockstep/data_parallel.h)

class DataParallel::Impl {
 public:
  Impl(Task task, Devices& devices, uint64_t seed) : task_(std::move(task)), devices_(devices) {
    replicas_ = get_params(devices_, task_, {.seed = seed});
    if (!devices_.on_gpus()) share_memory(replicas_);
  }

  torch::nn::Module& module() const { return *replicas_.front().model; }

  Tensor forward(const Batch& batch) {
    if (batch.size() == 0)
      throw UsageError({.what = "DataParallel::forward() of no samples", .next = "skip the batch"});
    replicate();
    const auto forward_as_caller = [task = task_, grad = at::GradMode::is_enabled()](const Replica& replica,
                                                                                     const Batch& part, const Device&) {
      const torch::AutoGradMode mode(grad);
      return replica.forward(task, part);
    };
    const Tensors outputs = run_replicas(devices_, replicas_, split_and_load(batch, devices_), forward_as_caller,
                                         /*clears_gradients=*/false);
    Tensor gathered = gather(outputs, devices_.where(0));
    if (!at::GradMode::is_enabled()) return gathered;
    gathered.requires_grad_();
    gathered.register_hook([in_backward = in_backward_](const Tensor&) {
      if (!*in_backward)
        throw UsageError({.what = "loss.backward() of what a DataParallel has computed",
                          .likely = "a loop for one module: the gradient would end at the gathered outputs",
                          .next = "call DataParallel::backward(loss)"});
    });
    const auto is_trained = [](const Tensor& output) { return output.defined() && output.requires_grad(); };
    if (std::ranges::any_of(outputs, is_trained)) passes_.push_back({outputs, gathered});
    return gathered;
  }

  void backward(const Tensor& loss) {
    const std::vector<Pass> passes = std::exchange(passes_, {});
    {
      *in_backward_ = true;
      const auto ends = c10::make_scope_exit([this] { *in_backward_ = false; });
      loss.backward();
    }
    for (const Pass& pass : passes)
      if (pass.gathered.grad().defined()) scatter_and_run_backward(devices_, pass.outputs, pass.gathered.grad());
    reduce_onto_first();
  }

 private:
  struct Pass {
    Tensors outputs;  // [device]: undefined where a device had no samples
    Tensor gathered;  // a leaf: each device's graph ends at its own outputs
  };

  // Makes the copy train what the module trains, in the modes that its modules are in.
  static void follow_modes(const torch::nn::Module& from, torch::nn::Module& into) {
    const auto modules = from.modules(), copies = into.modules();  // a module before those in it
    for (size_t i = 0; i < modules.size(); ++i)
      if (copies[i]->is_training() != modules[i]->is_training()) copies[i]->train(modules[i]->is_training());
    const auto parameters = from.parameters();
    auto their_parameters = into.parameters();
    for (size_t i = 0; i < parameters.size(); ++i)
      if (their_parameters[i].requires_grad() != parameters[i].requires_grad())
        their_parameters[i].set_requires_grad(parameters[i].requires_grad());
  }

  // Not by a write that autograd sees: the graphs of earlier forward()s stay valid while the values are the same. If
  // they are not, device 0's own graph is refused by autograd.
  void replicate() {
    for (const Replica& replica : replicas_) {
      copy_model(module(), *replica.model, /*is_seen=*/false);
      follow_modes(module(), *replica.model);
    }
  }

  void reduce_onto_first() {
    if (replicas_.size() == 1) return;
    devices_.run([parameters = with_gradients(parameters_of(replicas_)), replicas = replicas_](Device& device) {
      const torch::NoGradGuard no_grad;
      for (const Tensor& parameter : for_device(parameters, device)) device.reduce(parameter.grad());
      if (device.index() > 0) for_device(replicas, device).model->zero_grad();
    });
  }

  Task task_;
  Devices& devices_;
  Replicas replicas_;
  std::vector<Pass> passes_;  // since the last backward()
  std::shared_ptr<bool> in_backward_ = std::make_shared<bool>(false);
};

DataParallel::DataParallel(const Task& task, Devices& devices, uint64_t seed)
    : impl_(std::make_unique<Impl>(task, devices, seed)) {}
DataParallel::~DataParallel() = default;
torch::nn::Module& DataParallel::module() const { return impl_->module(); }
Tensor DataParallel::forward(const Batch& batch) { return impl_->forward(batch); }
void DataParallel::backward(const Tensor& loss) { impl_->backward(loss); }

}  // namespace lockstep
