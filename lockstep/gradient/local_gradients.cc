// SPDX-License-Identifier: Apache-2.0
#include "lockstep/gradient/local_gradients.h"

#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <utility>

#include "lockstep/error.h"

namespace lockstep {
namespace {

const void* pointer_to(const torch::Tensor& gradient) {
  return gradient.defined() && gradient.numel() > 0 ? gradient.const_data_ptr() : nullptr;
}

std::vector<torch::Tensor> gradients_in_grad(const std::vector<torch::Tensor>& parameters) {
  std::vector<torch::Tensor> gradients;
  gradients.reserve(parameters.size());
  for (const torch::Tensor& parameter : parameters) gradients.push_back(parameter.grad());
  return gradients;
}

void require_no_gradient(const std::vector<torch::Tensor>& parameters) {
  if (!std::ranges::all_of(parameters, [](const torch::Tensor& p) { return is_zero(p.grad()); }))
    throw UsageError(
        {.what = "step() with gradients that were not exchanged, on parameters that the ranks share",
         .likely = "no_sync() around the last backward() before step(), or a .grad that was set by hand, such as by "
                   "torch.autograd.grad()",
         .next = "let a backward() outside of no_sync() come before each step(); or give "
                 "DistributedDataParallel the option share_parameters = false"});
}

}  // namespace

torch::Tensor gradient_like(const torch::Tensor& parameter, const torch::Tensor& gradient) {
  const torch::NoGradGuard no_grad;
  if (!gradient.defined()) return {};
  if (gradient.layout() == torch::kStrided && gradient.strides() == parameter.strides() &&
      gradient.device() == parameter.device())
    return gradient;
  return torch::empty_like(parameter, parameter.options().requires_grad(false))
      .copy_(gradient.layout() == torch::kStrided ? gradient : gradient.to_dense());
}

WeightedGradients LocalGradients::begin_update(const std::vector<torch::Tensor>& parameters,
                                               const StepSettings& settings) {
  require_open();
  if (block_) {
    block_->require_in_place();
    block_->require_same_samples();
  }
  const bool is_changed = watch_.changed().has_value();
  if (!is_exchanged_ || (has_stepped_ && is_changed)) require_no_gradient(parameters);
  StepSettings all = settings;
  mean_was_changed_ = is_changed && !has_stepped_;
  all.push_back({kMeanChanged, mean_was_changed_ ? 1.0 : 0.0});
  agreement_.step(all);
  if (block_) block_->begin_write();
  current_ = std::exchange(lists_, {});
  if (current_.empty()) current_.push_back(gradients_in_grad(parameters));
  updated_.clear();
  WeightedGradients gradients{.weights = std::vector<double>(current_.size(), 1), .parallel_for = parallel_for_};
  gradients.pointers.reserve(parameters.size() * current_.size());
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    bool any = false;
    for (auto& list : current_) {
      list[i] = gradient_like(parameters[i], list[i]);
      gradients.pointers.push_back(pointer_to(list[i]));
      any = any || gradients.pointers.back() != nullptr;
    }
    if (any) updated_.push_back(parameters[i]);
  }
  return gradients;
}

// The version counters of the updated parameters are raised, as by any write in place: a graph that was made before the
// step then fails with an error instead of giving wrong gradients.
void LocalGradients::end_update() {
  current_.clear();
  if (block_) block_->end_write();
  agreement_.end_step();
  if (requires_exchanges_)
    watch_.remember_again();
  else
    watch_.forget();
  has_stepped_ = requires_exchanges_;
  if (block_)
    block_->mark_written();
  else
    for (const torch::Tensor& parameter : updated_) torch::autograd::impl::bump_version(parameter);
}

}  // namespace lockstep
