#include "lockstep/optimizer/optimizer.h"

#include "lockstep/base/error.h"
#include "lockstep/base/text.h"

namespace lockstep {

torch::Tensor Optimizer::step(LossClosure closure) {
  torch::Tensor loss;
  if (closure != nullptr) {
    const torch::AutoGradMode with_grad(true);
    loss = closure();
  }
  const torch::NoGradGuard no_grad;
  for (auto& group : param_groups_) {
    std::vector<torch::Tensor> with_gradient;
    for (const torch::Tensor& parameter : group.params())
      if (parameter.grad().defined()) with_gradient.push_back(parameter);
    if (!with_gradient.empty()) update(group, with_gradient);
  }
  return loss;
}

void set_learning_rate(torch::optim::Optimizer& optimizer, double lr) {
  for (auto& group : optimizer.param_groups()) group.options().set_lr(lr);
}

torch::Tensor gradient_like(const torch::Tensor& parameter) {
  const torch::Tensor& gradient = parameter.grad();
  if (gradient.strides() == parameter.strides()) return gradient;
  return torch::empty_like(parameter, parameter.options().requires_grad(false)).copy_(gradient);
}

torch::Tensor restored(const Optimizer::StateTensors& state, const std::string& name, const torch::Tensor& like) {
  const auto found = state.find(name);
  if (found == state.end() || found->second.sizes() != like.sizes() || found->second.dtype() != like.dtype())
    throw CheckpointError({.what = concat("no optimizer state \"", name, "\" of ", like.dtype().name(), like.sizes()),
                           .likely = "a checkpoint of another optimizer or model",
                           .next = "resume with the options that the run was started with"});
  return torch::empty_like(like, like.options().requires_grad(false)).copy_(found->second);
}

}  // namespace lockstep
