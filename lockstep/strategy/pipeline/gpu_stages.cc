// SPDX-License-Identifier: Apache-2.0
#include "lockstep/strategy/pipeline/gpu_stages.h"

#include "lockstep/collective/gpus.h"
#include "lockstep/collective/operator_spans.h"
#include "lockstep/model/parameters.h"
#include "lockstep/model/partial_model.h"
#include "lockstep/strategy/devices/gpu_team.h"
#include "lockstep/strategy/devices/replica.h"
#include "lockstep/strategy/pipeline/links.h"

namespace lockstep {
namespace {

std::vector<torch::Tensor> parameters_then_buffers(const torch::nn::Module& model) {
  std::vector<torch::Tensor> tensors;
  for (const auto& [name, tensor] : named_parameters(model)) tensors.push_back(tensor);
  for (const auto& [name, tensor] : named_buffers(model)) tensors.push_back(tensor);
  return tensors;
}

}  // namespace

GpuStages::GpuStages(const Task& task, ModulePtr whole, Devices& devices)
    : task_(task), whole_(std::move(whole)), devices_(devices) {
  const auto generator = hold_generator();
  const PartialModel partial(task_.make_model);
  for (int i = 0; i < devices_.size(); ++i) {
    const ModulePtr model = partial.make_part(0, [](torch::nn::Module&) { return std::vector<torch::Tensor>(); });
    name_modules(named_parameters(*model));
    parts_.push_back({model, pieces_of(task_, *model), parameters_then_buffers(*model)});
  }
}

void GpuStages::place(const Cut& cut) {
  const torch::NoGradGuard no_grad;
  cut_ = cut;
  tensors_.clear();
  shared_.clear();
  const StagedTensors staged = stage_tensors(*whole_, pieces_of(task_, *whole_), cut);
  for (std::size_t i = 0; i < staged.size(); ++i) {
    PlacedTensor placed{.whole = staged[i].named.tensor, .is_buffer = staged[i].is_buffer, .holders = {}};
    for (int device = 0; device < parts_.size(); ++device) {
      const torch::Tensor& tensor = parts_[device].tensors[i];
      if (staged[i].is_used_by(device % cut.size()))
        placed.holders.push_back({device, tensor});
      else if (is_held(tensor))
        put_data(tensor, on_meta(tensor));
    }
    place_tensor(placed);
    tensors_.push_back(placed);
    if (placed.holders.size() > 1) shared_.push_back(placed);
  }
}

void GpuStages::place_tensor(PlacedTensor& tensor) const {
  for (const Holder& each : tensor.holders) {
    const torch::Device gpu = devices_.where(each.device);
    const bool is_first = each.device == tensor.holders.front().device;
    const torch::Tensor data = on_device(gpu, [&] {
      const torch::Tensor there = brought_to(gpu, tensor.whole.detach());
      return is_first || !there.is_alias_of(tensor.whole) ? there : there.clone();
    });
    put_data(each.tensor, data);
    torch::Tensor(each.tensor).mutable_grad() = torch::Tensor();
    if (is_first) put_data(tensor.whole, data);
  }
  tensor.whole.mutable_grad() = torch::Tensor();
}

void GpuStages::follow_mode() {
  for (const Part& part : parts_)
    if (part.model->is_training() != whole_->is_training()) part.model->train(whole_->is_training());
}

void GpuStages::begin_step() {
  follow_mode();
  for (const Part& part : parts_) part.model->zero_grad();
  whole_->zero_grad();
}

void GpuStages::sum_gradients() {
  const auto add_up = [](const PlacedTensor& parameter) {
    torch::Tensor first = parameter.holders.front().tensor;
    for (const Holder& each : parameter.holders)
      if (each.tensor.grad().defined() && !each.tensor.is_same(first))
        dense_gradient(first).add_(brought_to(first.device(), each.tensor.grad()));
  };
  if (!shared_.empty())
    devices_.run([add_up, shared = shared_](Device& device) {
      const torch::NoGradGuard no_grad;
      for (const PlacedTensor& each : shared)
        if (!each.is_buffer && each.holders.front().device == device.index()) add_up(each);
    });
  for (PlacedTensor& each : tensors_) each.whole.mutable_grad() = each.holders.front().tensor.grad();
}

void GpuStages::copy_from_first(Copied what) {
  if (shared_.empty()) return;
  devices_.run([what, shared = shared_](Device& device) {
    const torch::NoGradGuard no_grad;
    for (const PlacedTensor& each : shared) {
      if (each.is_buffer && what == Copied::kParameters) continue;
      const torch::Tensor& first = each.holders.front().tensor;
      for (const Holder& holder : each.holders)
        if (holder.device == device.index() && !holder.tensor.is_same(first))
          copy_between(holder.tensor.detach(), first.detach());
    }
  });
}

torch::Tensor GpuStages::forward(const torch::Tensor& data) {
  follow_mode();
  Tensors tensors = {data.to(devices_.where(0))};
  for (int device = 0; device < cut_.size(); ++device)
    on_device(devices_.where(device), [&] {
      tensors = received_on(devices_.where(device), tensors);
      for (const Piece& piece : pieces(device)) tensors = piece.forward(tensors);
    });
  return tensors.at(0);
}

}  // namespace lockstep
