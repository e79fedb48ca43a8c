// SPDX-License-Identifier: Apache-2.0
#include "lockstep/optimizers.h"

#include <ATen/ops/_fused_adam.h>
#include <ATen/ops/_fused_adamw.h>

#include "lockstep/optimizer/adam_numbers.h"

namespace lockstep {
namespace {

template <class T>
AdamArrays<T> arrays_of(const Run<T>& run) {
  return {run.count, run.parameter, run.gradient, run.state[0], run.state[1]};
}

// Weight decay is part of the gradient.
template <class T>
void update_adam(const AdamOptions& options, const Run<T>& run) {
  auto numbers = adam_numbers<T>(options, run.step, options.lr);
  numbers.coupled = static_cast<T>(options.weight_decay);
  adam_update(numbers, arrays_of(run));
}

// Weight decay is applied to the parameter.
template <class T>
void update_adamw(const AdamWOptions& options, const Run<T>& run) {
  auto numbers = adam_numbers<T>(options, run.step, options.lr);
  numbers.keep = static_cast<T>(1 - options.lr * options.weight_decay);
  adam_update(numbers, arrays_of(run));
}

// libtorch's fused kernels take the step of each parameter as a tensor.
std::vector<torch::Tensor> step_tensors(const WholeTensors& tensors) {
  const auto options = torch::TensorOptions(tensors.parameters.front().device()).dtype(torch::kFloat32);
  std::vector<torch::Tensor> steps;
  for (const std::int64_t step : tensors.steps) steps.push_back(torch::full({}, static_cast<double>(step), options));
  return steps;
}

}  // namespace

Adam::Adam(std::vector<torch::Tensor> parameters, const AdamOptions& options)
    : Optimizer(std::move(parameters), std::make_unique<GroupOptions<AdamOptions>>(checked_adam("Adam", options)),
                {"exp_avg", "exp_avg_sq"}) {}

void Adam::update(const Group& group, const Run<float>& run) const { update_adam(options_of<AdamOptions>(group), run); }
void Adam::update(const Group& group, const Run<double>& run) const {
  update_adam(options_of<AdamOptions>(group), run);
}

void Adam::update_on_device(const Group& group, const WholeTensors& tensors) const {
  const AdamOptions& options = options_of<AdamOptions>(group);
  at::_fused_adam_(tensors.parameters, tensors.gradients, tensors.state[0], tensors.state[1], /*max_exp_avg_sqs=*/{},
                   step_tensors(tensors), options.lr, options.beta1, options.beta2, options.weight_decay, options.eps,
                   /*amsgrad=*/false, /*maximize=*/false);
}

AdamW::AdamW(std::vector<torch::Tensor> parameters, const AdamWOptions& options)
    : Optimizer(std::move(parameters), std::make_unique<GroupOptions<AdamWOptions>>(checked_adam("AdamW", options)),
                {"exp_avg", "exp_avg_sq"}) {}

void AdamW::update(const Group& group, const Run<float>& run) const {
  update_adamw(options_of<AdamWOptions>(group), run);
}
void AdamW::update(const Group& group, const Run<double>& run) const {
  update_adamw(options_of<AdamWOptions>(group), run);
}

void AdamW::update_on_device(const Group& group, const WholeTensors& tensors) const {
  const AdamWOptions& options = options_of<AdamWOptions>(group);
  at::_fused_adamw_(tensors.parameters, tensors.gradients, tensors.state[0], tensors.state[1], /*max_exp_avg_sqs=*/{},
                    step_tensors(tensors), options.lr, options.beta1, options.beta2, options.weight_decay, options.eps,
                    /*amsgrad=*/false, /*maximize=*/false);
}

}  // namespace lockstep
