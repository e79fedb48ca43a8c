// SPDX-License-Identifier: Apache-2.0
#include "lockstep/data_parallel.h"

#include <utility>
#include <vector>

#include <ATen/core/grad_mode.h>

#include "lockstep/error.h"
#include "lockstep/model/parameters.h"
#include "lockstep/strategy/devices/replica.h"
#include "lockstep/strategy/devices/thread_generator.h"

namespace lockstep {

class DataParallel::Impl {
 public:
  Impl(Task task, Devices& devices, std::uint64_t seed) : task_(std::move(task)), devices_(devices) {
    replicas_ = get_params(devices_, task_, {.seed = seed});
    if (!devices_.on_gpus()) share_with_first();
  }

  torch::nn::Module& module() const { return *replicas_.front().model; }

  torch::Tensor forward(const torch::Tensor& data) {
    if (data.size(0) == 0) throw UsageError({.what = "DataParallel::forward() of no samples"});
    replicate();
    const Tensors outputs = outputs_of(data);
    torch::Tensor gathered = gather(outputs);
    if (!at::GradMode::is_enabled()) return gathered;
    gathered.requires_grad_();
    gathered.register_hook([in_backward = in_backward_](const torch::Tensor&) {
      if (!*in_backward)
        throw UsageError({.what = "loss.backward() of what a DataParallel has computed",
                          .likely = "a loop for one module: the gradient would end at the gathered outputs",
                          .next = "call DataParallel::backward(loss)"});
    });
    passes_.push_back({outputs, gathered});
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
      if (pass.gathered.grad().defined()) scatter_and_run_backward(pass);
    reduce_onto_first();
  }

 private:
  struct Pass {
    Tensors outputs;         // [device]: undefined where a device had no samples
    torch::Tensor gathered;  // a leaf: each device's graph ends at its own outputs
  };

  // As share_parameters() in replica.h, but for any optimizer.
  void share_with_first() {
    const auto first = replicas_.front().model->parameters();
    for (std::size_t r = 1; r < replicas_.size(); ++r) {
      auto parameters = replicas_[r].model->parameters();
      for (std::size_t i = 0; i < first.size(); ++i) parameters[i].set_data(first[i].detach());
    }
  }

  // Not by a write that autograd sees: the graphs of earlier forward()s stay valid while the values are the same. If they
  // are not, device 0's own graph is refused by autograd.
  void replicate() {
    const torch::NoGradGuard no_grad;
    for (const auto tensors_of : {named_parameters, named_buffers}) {
      const auto first = tensors_of(module());
      for (const Replica& replica : replicas_) {
        const auto mine = tensors_of(*replica.model);
        for (std::size_t i = 0; i < first.size(); ++i)
          if (!mine[i].tensor.is_alias_of(first[i].tensor)) mine[i].tensor.variable_data().copy_(first[i].tensor);
      }
    }
    for (const Replica& replica : replicas_)
      if (replica.model->is_training() != module().is_training()) replica.model->train(module().is_training());
  }

  Tensors outputs_of(const torch::Tensor& data) {
    const auto parts = split_and_load({data, data}, devices_);
    const auto outputs = std::make_shared<Tensors>(parts.size());
    devices_.run([outputs, parts, task = task_, replicas = replicas_, grad = at::GradMode::is_enabled(),
                  seed = draw_seed()](Device& device) {
      const torch::AutoGradMode as_caller(grad);
      const Batch& part = for_device(parts, device);
      if (part.size() == 0) return;
      device.seed(seed_of(seed, device.index()));
      for_device(*outputs, device) = for_device(replicas, device).forward(task, part.data);
    });
    return *outputs;
  }

  torch::Tensor gather(const Tensors& outputs) const {
    Tensors defined;
    for (const torch::Tensor& output : outputs)
      if (output.defined()) defined.push_back(output.detach().to(devices_.where(0)));
    return torch::cat(defined);
  }

  void scatter_and_run_backward(const Pass& pass) {
    devices_.run([outputs = pass.outputs, gradient = pass.gathered.grad()](Device& device) {
      const torch::Tensor& output = for_device(outputs, device);
      if (!output.defined() || !output.requires_grad()) return;
      const Batch part = part_of({gradient, gradient}, device.index(), static_cast<int>(outputs.size()));
      output.backward(part.data.to(device.where()));
    });
  }

  void reduce_onto_first() {
    if (replicas_.size() == 1) return;
    devices_.run([parameters = with_gradients(replicas_), replicas = replicas_](Device& device) {
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
torch::Tensor DataParallel::forward(const torch::Tensor& data) { return impl_->forward(data); }
void DataParallel::backward(const torch::Tensor& loss) { impl_->backward(loss); }

}  // namespace lockstep
