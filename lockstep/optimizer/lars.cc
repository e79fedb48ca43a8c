// SPDX-License-Identifier: Apache-2.0
#include "lockstep/optimizers.h"

#include "lockstep/base/text.h"
#include "lockstep/error.h"

namespace lockstep {
namespace {

const LARSOptions& checked(const LARSOptions& options) {
  if (options.lr < 0 || options.momentum < 0 || options.weight_decay < 0 || options.trust <= 0)
    throw UsageError({.what = concat("LARS with lr ", options.lr, ", momentum ", options.momentum, ", weight decay ",
                                     options.weight_decay, ", trust ", options.trust),
                      .likely = "a negative value, or no trust"});
  return options;
}

template <class T>
void update_run(const LARSOptions& options, const Run<T>& run) {
  const T rate = static_cast<T>(options.lr * run.trust);
  const T momentum = static_cast<T>(options.momentum);
  const T decay = static_cast<T>(options.weight_decay);
  T* __restrict parameter = run.parameter;
  T* __restrict buffer = run.state[0];
  const T* __restrict gradient = run.gradient;
  for (std::int64_t i = 0; i < run.count; ++i) {
    buffer[i] = momentum * buffer[i] + rate * (gradient[i] + decay * parameter[i]);
    parameter[i] -= buffer[i];
  }
}

}  // namespace

LARS::LARS(std::vector<torch::Tensor> parameters, const LARSOptions& options)
    : Optimizer(std::move(parameters), std::make_unique<GroupOptions<LARSOptions>>(checked(options)),
                {"momentum_buffer"}) {}

double LARS::trust_ratio(const Group& group, double parameter_norm, double gradient_norm) const {
  const LARSOptions& options = options_of<LARSOptions>(group);
  if (parameter_norm == 0 || gradient_norm == 0) return 1;
  return options.trust * parameter_norm / (gradient_norm + options.weight_decay * parameter_norm);
}

void LARS::update(const Group& group, const Run<float>& run) const { update_run(options_of<LARSOptions>(group), run); }
void LARS::update(const Group& group, const Run<double>& run) const { update_run(options_of<LARSOptions>(group), run); }

void LARS::update_on_device(const Group& group, const WholeTensors& tensors) const {
  const LARSOptions& options = options_of<LARSOptions>(group);
  const auto& [parameters, gradients, state, steps] = tensors;
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    const torch::Tensor p = parameters[i].norm();
    const torch::Tensor g = gradients[i].norm();
    const torch::Tensor ratio =
        torch::where((p > 0) & (g > 0), options.trust * p / (g + options.weight_decay * p), 1.0);
    state[0][i].mul_(options.momentum).add_(ratio * (gradients[i] + options.weight_decay * parameters[i]), options.lr);
    parameters[i].sub_(state[0][i]);
  }
}

}  // namespace lockstep
