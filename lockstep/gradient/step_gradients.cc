#include "lockstep/gradient/step_gradients.h"

namespace lockstep {

torch::Tensor gradient_like(const torch::Tensor& parameter) {
  const torch::NoGradGuard no_grad;
  const torch::Tensor& gradient = parameter.grad();
  if (!gradient.defined()) return {};
  if (gradient.layout() == torch::kStrided && gradient.strides() == parameter.strides()) return gradient;
  return torch::empty_like(parameter, parameter.options().requires_grad(false))
      .copy_(gradient.layout() == torch::kStrided ? gradient : gradient.to_dense());
}

StepGradients MeanGradients::take(const std::vector<torch::Tensor>& parameters) {
  StepGradients gradients{.weights = {1}};
  kept_.clear();
  for (const torch::Tensor& parameter : parameters) {
    const torch::Tensor& gradient = kept_.emplace_back(gradient_like(parameter));
    gradients.pointers.push_back(gradient.defined() && gradient.numel() > 0 ? gradient.const_data_ptr() : nullptr);
  }
  return gradients;
}

void MeanGradients::updated() {
  kept_.clear();
  memory_->barrier();
}

}  // namespace lockstep
