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

// libtorch's fused kernel does not store 16-bit parameters on a CPU (pytorch#191763): for those, the formula as it stands.
bool needs_plain_update(const torch::Tensor& parameter) { return parameter.is_cpu() && parameter.element_size() == 2; }

void update_plainly(torch::Tensor parameter, torch::Tensor gradient, const torch::Tensor& buffer,
                    const SGDOptions& options) {
  if (options.weight_decay != 0) gradient = gradient.add(parameter, options.weight_decay);
  if (options.momentum != 0) {
    buffer.mul_(options.momentum).add_(gradient);
    gradient = options.nesterov ? gradient.add(buffer, options.momentum) : buffer;
  }
  parameter.add_(gradient, -options.lr);
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
  std::vector<torch::Tensor> fused, gradients, buffers;
  for (const torch::Tensor& parameter : parameters) {
    const torch::Tensor buffer = options.momentum == 0 ? torch::Tensor() : momentum_buffer(parameter);
    if (needs_plain_update(parameter)) {
      update_plainly(parameter, parameter.grad(), buffer, options);
      continue;
    }
    fused.push_back(parameter);
    gradients.push_back(gradient_like(parameter));
    if (buffer.defined()) buffers.push_back(buffer);
  }
  if (fused.empty()) return;
  at::_fused_sgd_(fused, gradients, buffers, options.weight_decay, options.momentum, options.lr,
                  /*dampening=*/0, options.nesterov, /*maximize=*/false, /*is_first_step=*/false);
}

torch::Tensor SGD::momentum_buffer(const torch::Tensor& parameter) {
  auto& state = state_[parameter.unsafeGetTensorImpl()];
  if (!state) {
    auto fresh = std::make_unique<SGDState>();
    fresh->momentum_buffer = torch::zeros_like(parameter);  // momentum * 0 + g is the first step's buffer
    state = std::move(fresh);
  }
  return static_cast<SGDState&>(*state).momentum_buffer;
}

}  // namespace lockstep
