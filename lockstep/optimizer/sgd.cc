// SPDX-License-Identifier: Apache-2.0
#include "lockstep/optimizers.h"

#include <ATen/ops/_fused_sgd.h>

#include "lockstep/base/text.h"
#include "lockstep/error.h"

namespace lockstep {
namespace {

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

template <class T>
void descend(const SGDOptions& options, const Run<T>& run) {
  const T lr = static_cast<T>(options.lr);
  const T decay = static_cast<T>(options.weight_decay);
  T* __restrict parameter = run.parameter;
  const T* __restrict gradient = run.gradient;
  for (std::int64_t i = 0; i < run.count; ++i) parameter[i] -= lr * (gradient[i] + decay * parameter[i]);
}

template <class T>
void descend_with_momentum(const SGDOptions& options, const Run<T>& run) {
  const T lr = static_cast<T>(options.lr);
  const T decay = static_cast<T>(options.weight_decay);
  const T momentum = static_cast<T>(options.momentum);
  const T of_gradient = options.nesterov ? T(1) : T(0);
  const T of_buffer = options.nesterov ? momentum : T(1);
  T* __restrict parameter = run.parameter;
  T* __restrict buffer = run.state[0];
  const T* __restrict gradient = run.gradient;
  for (std::int64_t i = 0; i < run.count; ++i) {
    const T g = gradient[i] + decay * parameter[i];
    const T v = momentum * buffer[i] + g;
    buffer[i] = v;
    parameter[i] -= lr * (of_gradient * g + of_buffer * v);
  }
}

template <class T>
void update_run(const SGDOptions& options, const Run<T>& run) {
  if (options.momentum == 0) return descend(options, run);
  if (run.state[0] == nullptr)
    throw UsageError({.what = "a parameter group with momentum in an SGD that was made without",
                      .next = "make the SGD with momentum, and the group that needs none with momentum 0"});
  descend_with_momentum(options, run);
}

std::vector<std::string> state_names(const SGDOptions& options) {
  if (options.momentum == 0) return {};
  return {"momentum_buffer"};
}

}  // namespace

SGD::SGD(std::vector<torch::Tensor> parameters, const SGDOptions& options)
    : Optimizer(std::move(parameters), std::make_unique<GroupOptions<SGDOptions>>(checked(options)),
                state_names(options)) {}

void SGD::update(const Group& group, const Run<float>& run) const { update_run(options_of<SGDOptions>(group), run); }
void SGD::update(const Group& group, const Run<double>& run) const { update_run(options_of<SGDOptions>(group), run); }

void SGD::update_on_device(const Group& group, const WholeTensors& tensors) const {
  const SGDOptions& options = options_of<SGDOptions>(group);
  const std::vector<torch::Tensor> buffers = tensors.state.empty() ? std::vector<torch::Tensor>{} : tensors.state[0];
  at::_fused_sgd_(tensors.parameters, tensors.gradients, buffers, options.weight_decay, options.momentum, options.lr,
                  /*dampening=*/0, options.nesterov, /*maximize=*/false, /*is_first_step=*/false);
}

}  // namespace lockstep
