#include "lockstep/optimizers.h"

#include <cmath>

#include <ATen/ops/_fused_adam.h>
#include <ATen/ops/_fused_adamw.h>

#include "lockstep/base/text.h"
#include "lockstep/error.h"
#include "lockstep/optimizer/adam_kernels.h"

namespace lockstep {
namespace {

template <class Options>
const Options& checked(const char* name, const Options& options) {
  const auto is_fraction = [](double value) { return value >= 0 && value < 1; };
  if (options.lr < 0 || options.weight_decay < 0 || options.eps < 0 || !is_fraction(options.beta1) ||
      !is_fraction(options.beta2))
    throw UsageError({.what = concat(name, " with lr ", options.lr, ", weight decay ", options.weight_decay, ", eps ",
                                     options.eps, ", betas ", options.beta1, " and ", options.beta2),
                      .likely = "a negative value, or a beta outside [0, 1)"});
  return options;
}

// coupled: weight decay as part of the gradient (Adam); decoupled: of the parameter (AdamW).
template <class T, class Options>
void update_run(const Options& options, const Run<T>& run, double coupled, double decoupled) {
  const auto step = static_cast<double>(run.step);
  adam_update(AdamNumbers<T>{.beta1 = static_cast<T>(options.beta1),
                             .rest1 = static_cast<T>(1 - options.beta1),
                             .beta2 = static_cast<T>(options.beta2),
                             .rest2 = static_cast<T>(1 - options.beta2),
                             .root = static_cast<T>(1 / std::sqrt(1 - std::pow(options.beta2, step))),
                             .rate = static_cast<T>(options.lr / (1 - std::pow(options.beta1, step))),
                             .eps = static_cast<T>(options.eps),
                             .coupled = static_cast<T>(coupled),
                             .keep = static_cast<T>(1 - options.lr * decoupled)},
              AdamArrays<T>{run.count, run.parameter, run.gradient, run.state[0], run.state[1]});
}

template <class T>
void update_adam(const UpdateRule::Group& group, const Run<T>& run) {
  const auto& options = options_of<AdamOptions>(group);
  update_run(options, run, /*coupled=*/options.weight_decay, /*decoupled=*/0);
}

template <class T>
void update_adamw(const UpdateRule::Group& group, const Run<T>& run) {
  const auto& options = options_of<AdamWOptions>(group);
  update_run(options, run, /*coupled=*/0, /*decoupled=*/options.weight_decay);
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
    : Optimizer(std::move(parameters), std::make_unique<GroupOptions<AdamOptions>>(checked("Adam", options)),
                {"exp_avg", "exp_avg_sq"}) {}

void Adam::update(const Group& group, const Run<float>& run) const { update_adam(group, run); }
void Adam::update(const Group& group, const Run<double>& run) const { update_adam(group, run); }

void Adam::update_on_device(const Group& group, const WholeTensors& tensors) const {
  const AdamOptions& options = options_of<AdamOptions>(group);
  at::_fused_adam_(tensors.parameters, tensors.gradients, tensors.state[0], tensors.state[1], /*max_exp_avg_sqs=*/{},
                   step_tensors(tensors), options.lr, options.beta1, options.beta2,
                   options.weight_decay, options.eps, /*amsgrad=*/false, /*maximize=*/false);
}

AdamW::AdamW(std::vector<torch::Tensor> parameters, const AdamWOptions& options)
    : Optimizer(std::move(parameters), std::make_unique<GroupOptions<AdamWOptions>>(checked("AdamW", options)),
                {"exp_avg", "exp_avg_sq"}) {}

void AdamW::update(const Group& group, const Run<float>& run) const { update_adamw(group, run); }
void AdamW::update(const Group& group, const Run<double>& run) const { update_adamw(group, run); }

void AdamW::update_on_device(const Group& group, const WholeTensors& tensors) const {
  const AdamWOptions& options = options_of<AdamWOptions>(group);
  at::_fused_adamw_(tensors.parameters, tensors.gradients, tensors.state[0], tensors.state[1], /*max_exp_avg_sqs=*/{},
                    step_tensors(tensors), options.lr, options.beta1, options.beta2,
                    options.weight_decay, options.eps, /*amsgrad=*/false, /*maximize=*/false);
}

}  // namespace lockstep
