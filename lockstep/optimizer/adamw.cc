#include "lockstep/optimizer/adamw.h"

#include <ATen/ops/_fused_adamw.h>

#include "lockstep/base/error.h"
#include "lockstep/base/text.h"

namespace lockstep {
namespace {

struct AdamWState : torch::optim::OptimizerCloneableParamState<AdamWState> {
  torch::Tensor exp_avg;
  torch::Tensor exp_avg_sq;
  torch::Tensor step;  // a float32 scalar on the parameter's device, as the kernel wants it
};

const AdamWOptions& checked(const AdamWOptions& options) {
  const auto is_fraction = [](double value) { return value >= 0 && value < 1; };
  if (options.lr < 0 || options.weight_decay < 0 || options.eps < 0 || !is_fraction(options.beta1) ||
      !is_fraction(options.beta2))
    throw UsageError({.what = concat("AdamW with lr ", options.lr, ", weight decay ", options.weight_decay, ", eps ",
                                     options.eps, ", betas ", options.beta1, " and ", options.beta2),
                      .likely = "a negative value, or a beta outside [0, 1)"});
  return options;
}

torch::Tensor zero_step(const torch::Tensor& parameter) {
  return torch::zeros({}, torch::TensorOptions().dtype(torch::kFloat32).device(parameter.device()));
}

std::unique_ptr<AdamWState> fresh_state(const torch::Tensor& parameter) {
  auto state = std::make_unique<AdamWState>();
  state->exp_avg = torch::zeros_like(parameter);
  state->exp_avg_sq = torch::zeros_like(parameter);
  state->step = zero_step(parameter);
  return state;
}

}  // namespace

AdamW::AdamW(std::vector<torch::Tensor> parameters, const AdamWOptions& options)
    : Optimizer(std::move(parameters), std::make_unique<GroupOptions<AdamWOptions>>(checked(options))) {}

Optimizer::StateTensors AdamW::state_of(const torch::Tensor& parameter) const {
  const auto found = state_.find(parameter.unsafeGetTensorImpl());
  if (found == state_.end()) return {};
  const auto& state = static_cast<const AdamWState&>(*found->second);
  return {{"exp_avg", state.exp_avg}, {"exp_avg_sq", state.exp_avg_sq}, {"step", state.step}};
}

void AdamW::set_state(const torch::Tensor& parameter, const StateTensors& saved) {
  state_.erase(parameter.unsafeGetTensorImpl());
  if (saved.empty()) return;
  auto state = std::make_unique<AdamWState>();
  state->exp_avg = restored(saved, "exp_avg", parameter);
  state->exp_avg_sq = restored(saved, "exp_avg_sq", parameter);
  state->step = restored(saved, "step", zero_step(parameter));
  state_[parameter.unsafeGetTensorImpl()] = std::move(state);
}

void AdamW::update(torch::optim::OptimizerParamGroup& group, const std::vector<torch::Tensor>& parameters) {
  const AdamWOptions& options = static_cast<GroupOptions<AdamWOptions>&>(group.options()).values;
  std::vector<torch::Tensor> gradients, exp_avgs, exp_avg_sqs, steps;
  for (const torch::Tensor& parameter : parameters) {
    auto& state = state_[parameter.unsafeGetTensorImpl()];
    if (!state) state = fresh_state(parameter);
    auto& adam = static_cast<AdamWState&>(*state);
    gradients.push_back(gradient_like(parameter));
    exp_avgs.push_back(adam.exp_avg);
    exp_avg_sqs.push_back(adam.exp_avg_sq);
    steps.push_back(adam.step.add_(1));
  }
  at::_fused_adamw_(parameters, gradients, exp_avgs, exp_avg_sqs, /*max_exp_avg_sqs=*/{}, steps, options.lr,
                    options.beta1, options.beta2, options.weight_decay, options.eps, /*amsgrad=*/false,
                    /*maximize=*/false);
}

}  // namespace lockstep
