// SPDX-License-Identifier: Apache-2.0
#include "lockstep/optimizers.h"

#include <cmath>

#include "lockstep/optimizer/adam_numbers.h"

namespace lockstep {
namespace {

template <class T>
void find_direction(const LAMBOptions& options, const Run<T>& run) {
  lamb_direction(adam_numbers<T>(options, run.step, /*lr=*/1), static_cast<T>(options.weight_decay),
                 AdamArrays<T>{run.count, run.parameter, run.gradient, run.state[0], run.state[1]});
}

template <class T>
void follow_direction(double lr, const Run<T>& run) {
  const T rate = static_cast<T>(lr * run.trust);
  T* __restrict parameter = run.parameter;
  const T* __restrict direction = run.gradient;
  for (std::int64_t i = 0; i < run.count; ++i) parameter[i] -= rate * direction[i];
}

}  // namespace

LAMB::LAMB(std::vector<torch::Tensor> parameters, const LAMBOptions& options)
    : Optimizer(std::move(parameters), std::make_unique<GroupOptions<LAMBOptions>>(checked_adam("LAMB", options)),
                {"exp_avg", "exp_avg_sq"}) {}

void LAMB::direct(const Group& group, const Run<float>& run) const {
  find_direction(options_of<LAMBOptions>(group), run);
}
void LAMB::direct(const Group& group, const Run<double>& run) const {
  find_direction(options_of<LAMBOptions>(group), run);
}

double LAMB::trust_ratio(const Group&, double parameter_norm, double direction_norm) const {
  return parameter_norm > 0 && direction_norm > 0 ? parameter_norm / direction_norm : 1;
}

void LAMB::update(const Group& group, const Run<float>& run) const {
  follow_direction(options_of<LAMBOptions>(group).lr, run);
}
void LAMB::update(const Group& group, const Run<double>& run) const {
  follow_direction(options_of<LAMBOptions>(group).lr, run);
}

void LAMB::update_on_device(const Group& group, const WholeTensors& tensors) const {
  const LAMBOptions& options = options_of<LAMBOptions>(group);
  const auto& [parameters, gradients, state, steps] = tensors;
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    const auto step = static_cast<double>(steps[i]);
    state[0][i].mul_(options.beta1).add_(gradients[i], 1 - options.beta1);
    state[1][i].mul_(options.beta2).addcmul_(gradients[i], gradients[i], 1 - options.beta2);
    const torch::Tensor m = state[0][i] / (1 - std::pow(options.beta1, step));
    const torch::Tensor v = state[1][i] / (1 - std::pow(options.beta2, step));
    const torch::Tensor direction = m / (v.sqrt() + options.eps) + options.weight_decay * parameters[i];
    const torch::Tensor ratio = parameters[i].norm() / direction.norm();
    parameters[i].add_(direction * torch::where(torch::isfinite(ratio) & (ratio > 0), ratio, 1.0), -options.lr);
  }
}

}  // namespace lockstep
