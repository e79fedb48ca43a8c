// SPDX-License-Identifier: Apache-2.0
#include "lockstep/step/local_gradients.h"

#include <torch/csrc/autograd/variable.h>

#include <utility>

namespace lockstep {

torch::Tensor gradient_like(const torch::Tensor& parameter, const torch::Tensor& gradient) {
  const torch::NoGradGuard no_grad;
  if (!gradient.defined()) return {};
  if (gradient.layout() == torch::kStrided && gradient.strides() == parameter.strides() &&
      gradient.device() == parameter.device())
    return gradient;
  return torch::empty_like(parameter, parameter.options().requires_grad(false))
      .copy_(gradient.layout() == torch::kStrided ? gradient : gradient.to_dense());
}

WeightedGradients LocalGradients::begin_update(const Tensors& parameters, const StepSettings&) {
  current_ = std::exchange(lists_, {});
  if (current_.empty()) {
    current_.emplace_back();
    for (const torch::Tensor& parameter : parameters) current_.back().push_back(parameter.grad());
  }
  updated_.clear();
  WeightedGradients gradients{.weights = std::vector<double>(current_.size(), 1), .parallel_for = parallel_for_};
  gradients.pointers.reserve(parameters.size() * current_.size());
  for (size_t i = 0; i < parameters.size(); ++i) {
    bool any = false;
    for (auto& list : current_) {
      const torch::Tensor& gradient = list[i] = gradient_like(parameters[i], list[i]);
      gradients.pointers.push_back(gradient.defined() && gradient.numel() > 0 ? gradient.const_data_ptr() : nullptr);
      any = any || gradients.pointers.back() != nullptr;
    }
    if (any) updated_.push_back(parameters[i]);
  }
  return gradients;
}

// Raises the version counters of the updated parameters, as any write in place does: a graph that was made before the step
// then fails with an error instead of giving wrong gradients.
void LocalGradients::end_update() {
  release();
  for (const torch::Tensor& parameter : updated_) torch::autograd::impl::bump_version(parameter);
}

}  // namespace lockstep
