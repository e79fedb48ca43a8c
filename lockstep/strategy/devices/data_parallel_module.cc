// SPDX-License-Identifier: Apache-2.0
#include "lockstep/data_parallel.h"

#include <algorithm>
#include <utility>
#include <vector>

#include <ATen/core/grad_mode.h>

#include "lockstep/error.h"
#include "lockstep/strategy/devices/replica.h"

namespace lockstep {

class DataParallel::Impl {
 public:
  Impl(Task task, Devices& devices, std::uint64_t seed) : task_(std::move(task)), devices_(devices) {
    replicas_ = get_params(devices_, task_, {.seed = seed});
    if (!devices_.on_gpus()) share_memory(replicas_);
  }

  torch::nn::Module& module() const { return *replicas_.front().model; }

  torch::Tensor forward(const Batch& batch) {
    if (batch.size() == 0)
      throw UsageError({.what = "DataParallel::forward() of no samples", .next = "skip the batch"});
    replicate();
    const auto forward_as_caller = [task = task_, grad = at::GradMode::is_enabled()](const Replica& replica,
                                                                                     const Batch& part) {
      const torch::AutoGradMode mode(grad);
      return replica.forward(task, part);
    };
    const Tensors outputs = run_replicas(devices_, replicas_, split_and_load(batch, devices_), forward_as_caller,
                                         /*clears_gradients=*/false);
    torch::Tensor gathered = gather(outputs, devices_.where(0));
    if (!at::GradMode::is_enabled()) return gathered;
    gathered.requires_grad_();
    gathered.register_hook([in_backward = in_backward_](const torch::Tensor&) {
      if (!*in_backward)
        throw UsageError({.what = "loss.backward() of what a DataParallel has computed",
                          .likely = "a loop for one module: the gradient would end at the gathered outputs",
                          .next = "call DataParallel::backward(loss)"});
    });
    const auto is_trained = [](const torch::Tensor& output) { return output.defined() && output.requires_grad(); };
    if (std::ranges::any_of(outputs, is_trained)) passes_.push_back({outputs, gathered});
    return gathered;
  }

  void backward(const torch::Tensor& loss) {
    const std::vector<Pass> passes = std::exchange(passes_, {});
    *in_backward_ = true;
    try {
      loss.backward();
    } catch (...) {
      *in_backward_ = false;
      throw;
    }
    *in_backward_ = false;
    for (const Pass& pass : passes)
      if (pass.gathered.grad().defined()) scatter_and_run_backward(devices_, pass.outputs, pass.gathered.grad());
    reduce_onto_first();
  }

 private:
  struct Pass {
    Tensors outputs;         // [device]: undefined where a device had no samples
    torch::Tensor gathered;  // a leaf: each device's graph ends at its own outputs
  };

  // Makes the copy train what the module trains, in the modes that its modules are in.
  static void follow_modes(const torch::nn::Module& from, torch::nn::Module& into) {
    const auto modules = from.modules(), copies = into.modules();  // a module before those in it
    for (std::size_t i = 0; i < modules.size(); ++i)
      if (copies[i]->is_training() != modules[i]->is_training()) copies[i]->train(modules[i]->is_training());
    const auto parameters = from.parameters();
    auto their_parameters = into.parameters();
    for (std::size_t i = 0; i < parameters.size(); ++i)
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
      for (const torch::Tensor& parameter : for_device(parameters, device)) device.reduce(parameter.grad());
      if (device.index() > 0) for_device(replicas, device).model->zero_grad();
    });
  }

  Task task_;
  Devices& devices_;
  Replicas replicas_;
  std::vector<Pass> passes_;  // since the last backward()
  std::shared_ptr<bool> in_backward_ = std::make_shared<bool>(false);
};

DataParallel::DataParallel(const Task& task, Devices& devices, std::uint64_t seed)
    : impl_(std::make_unique<Impl>(task, devices, seed)) {}
DataParallel::~DataParallel() = default;
torch::nn::Module& DataParallel::module() const { return impl_->module(); }
torch::Tensor DataParallel::forward(const Batch& batch) { return impl_->forward(batch); }
void DataParallel::backward(const torch::Tensor& loss) { impl_->backward(loss); }

}  // namespace lockstep
