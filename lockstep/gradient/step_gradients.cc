#include "lockstep/gradient/step_gradients.h"

namespace lockstep {
namespace {

const void* pointer_to(const torch::Tensor& gradient) {
  return gradient.defined() && gradient.numel() > 0 ? gradient.const_data_ptr() : nullptr;
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

StepGradients MeanGradients::take(const std::vector<torch::Tensor>& parameters) {
  StepGradients gradients{.weights = {1}};
  kept_.clear();
  for (const torch::Tensor& parameter : parameters) {
    const torch::Tensor& gradient = kept_.emplace_back(gradient_like(parameter));
    gradients.pointers.push_back(pointer_to(gradient));
  }
  return gradients;
}

StepGradients SummedGradients::take(const std::vector<torch::Tensor>& parameters) {
  StepGradients gradients{.weights = std::vector<double>(lists_.size(), 1), .parallel_for = parallel_for_};
  for (std::size_t i = 0; i < parameters.size(); ++i)
    for (auto& list : lists_) {
      list[i] = gradient_like(parameters[i], list[i]);
      gradients.pointers.push_back(pointer_to(list[i]));
    }
  return gradients;
}

void MeanGradients::updated() {
  kept_.clear();
  memory_->barrier();
}

}  // namespace lockstep
