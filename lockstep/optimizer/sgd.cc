#include "lockstep/optimizer/sgd.h"

#include <ATen/ops/_fused_sgd.h>

#include "lockstep/base/error.h"
#include "lockstep/base/text.h"

namespace lockstep {
namespace {

struct SGDState : torch::optim::OptimizerCloneableParamState<SGDState> {
  torch::Tensor momentum_buffer;
};

const SGDOptions& checked(const SGDOptions& options) {
  if (options.lr < 0 || options.momentum < 0 || options.weight_decay < 0)
    throw UsageError({.what = concat("SGD with lr ", options.lr, ", momentum ", options.momentum, ", weight decay ",
                                     options.weight_decay, ": none may be negative")});
  if (options.nesterov && options.momentum == 0)
    throw UsageError({.what = "SGD with nesterov, but momentum 0",
                      .likely = "--nesterov without --momentum",
                      .next = "give a momentum such as 0.9"});
  return options;
}

const SGDState* find_state(const SGD& sgd, const torch::Tensor& parameter) {
  const auto found = sgd.state().find(parameter.unsafeGetTensorImpl());
  return found == sgd.state().end() ? nullptr : static_cast<const SGDState*>(found->second.get());
}

}  // namespace

SGD::SGD(std::vector<torch::Tensor> parameters, const SGDOptions& options)
    : Optimizer(std::move(parameters), std::make_unique<GroupOptions<SGDOptions>>(checked(options))) {}

Optimizer::StateTensors SGD::state_of(const torch::Tensor& parameter) const {
  const SGDState* state = find_state(*this, parameter);
  if (state == nullptr) return {};
  return {{"momentum_buffer", state->momentum_buffer}};
}

void SGD::set_state(const torch::Tensor& parameter, const StateTensors& saved) {
  state_.erase(parameter.unsafeGetTensorImpl());
  if (saved.empty()) return;
  auto state = std::make_unique<SGDState>();
  state->momentum_buffer = restored(saved, "momentum_buffer", parameter);
  state_[parameter.unsafeGetTensorImpl()] = std::move(state);
}

void SGD::update(torch::optim::OptimizerParamGroup& group, const std::vector<torch::Tensor>& parameters) {
  const SGDOptions& options = static_cast<GroupOptions<SGDOptions>&>(group.options()).values;
  std::vector<torch::Tensor> gradients;
  std::vector<torch::Tensor> buffers;
  for (const torch::Tensor& parameter : parameters) {
    gradients.push_back(parameter.grad());
    if (options.momentum == 0) continue;
    auto& state = state_[parameter.unsafeGetTensorImpl()];
    if (!state) {
      auto fresh = std::make_unique<SGDState>();
      fresh->momentum_buffer = torch::zeros_like(parameter);  // 0 * momentum + g is the first step's buffer g
      state = std::move(fresh);
    }
    buffers.push_back(static_cast<SGDState&>(*state).momentum_buffer);
  }
  at::_fused_sgd_(parameters, gradients, buffers, options.weight_decay, options.momentum, options.lr,
                  /*dampening=*/0, options.nesterov, /*maximize=*/false, /*is_first_step=*/false);
}

}  // namespace lockstep
