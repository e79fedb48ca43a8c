// SPDX-License-Identifier: Apache-2.0
#include "lockstep/optimizer/device_update.h"

#include <ATen/ops/_foreach_clamp_max.h>
#include <ATen/ops/_foreach_clamp_min.h>
#include <ATen/ops/_foreach_lerp.h>
#include <ATen/ops/_foreach_mul.h>
#include <ATen/ops/_foreach_norm.h>

#include <algorithm>
#include <cmath>

#include "lockstep/gradient/local_gradients.h"

namespace lockstep {

// Those of the optimizer's parameters that this step updates.
struct DeviceUpdate::Updated {
  std::vector<std::size_t> index;        // in OptimizerState::parameters
  std::vector<torch::Tensor> values;     // the parameter, or the float32 master of a 16-bit one
  std::vector<torch::Tensor> gradients;  // of their dtype and memory order
};

DeviceUpdate::DeviceUpdate(OptimizerState& state) : state_(state) {
  const auto beside = [&](bool (*wanted)(const torch::Tensor&)) {
    std::vector<torch::Tensor> arrays(state.parameters.size());
    for (std::size_t i = 0; i < arrays.size(); ++i) {
      const torch::Tensor parameter = state.parameters[i].detach();
      const auto dtype = is_16_bit(parameter) ? torch::kFloat32 : parameter.scalar_type();
      if (wanted(parameter)) arrays[i] = torch::zeros_like(parameter, parameter.options().dtype(dtype));
    }
    return arrays;
  };
  const auto every = [](const torch::Tensor&) { return true; };
  for (auto& array : state.arrays) array = beside(every);
  if (state.ema_decay > 0) state.averages = beside(every);
  if (std::ranges::any_of(state.parameters, is_16_bit)) state.masters = beside(is_16_bit);
}

// Where a 16-bit parameter is not its rounded master, it was written since the last step: from a checkpoint, or before the
// first one.
DeviceUpdate::Updated DeviceUpdate::find_updated() const {
  Updated updated;
  for (std::size_t i = 0; i < state_.parameters.size(); ++i) {
    const torch::Tensor parameter = state_.parameters[i].detach();
    if (!state_.parameters[i].grad().defined()) continue;
    torch::Tensor gradient = gradient_like(state_.parameters[i]);
    updated.index.push_back(i);
    if (!is_16_bit(parameter)) {
      updated.values.push_back(parameter);
      updated.gradients.push_back(gradient);
      continue;
    }
    const torch::Tensor& master = state_.masters[i];
    master.copy_(torch::where(master.to(parameter.scalar_type()).eq(parameter), master, parameter.to(torch::kFloat32)));
    updated.values.push_back(master);
    updated.gradients.push_back(gradient.to(torch::kFloat32));
  }
  return updated;
}

// As torch::nn::utils::clip_grad_norm_ and clip_grad_value_, of gradients without the loss scale. false: some gradient is
// not finite.
bool DeviceUpdate::clip(std::vector<torch::Tensor>& gradients, const ClippingOptions& clipping,
                        const std::optional<double>& loss_scale) {
  if (gradients.empty()) return true;
  double factor = 1 / loss_scale.value_or(1);
  if (loss_scale || clipping.max_norm > 0) {
    const auto norms = at::_foreach_norm(gradients, 2, torch::kFloat64);
    gradient_norm_ = torch::stack(norms).norm().item<double>() * factor;
    if (loss_scale && !std::isfinite(gradient_norm_)) return false;
  }
  if (clipping.max_norm > 0) factor *= std::min(1.0, clipping.max_norm / (gradient_norm_ + 1e-6));
  if (factor != 1) gradients = at::_foreach_mul(gradients, factor);
  if (clipping.max_value > 0)
    gradients = at::_foreach_clamp_min(at::_foreach_clamp_max(gradients, clipping.max_value), -clipping.max_value);
  return true;
}

bool DeviceUpdate::run(const UpdateRule& rule, const std::vector<UpdateRule::Group>& groups,
                       const ClippingOptions& clipping, const std::optional<double>& loss_scale) {
  Updated updated = find_updated();
  if (!clip(updated.gradients, clipping, loss_scale)) return false;
  for (std::size_t group = 0; group < groups.size(); ++group) {
    WholeTensors tensors;
    tensors.state.resize(state_.arrays.size());
    for (std::size_t u = 0; u < updated.index.size(); ++u) {
      const std::size_t i = updated.index[u];
      if (state_.group_of[i] != group) continue;
      tensors.parameters.push_back(updated.values[u]);
      tensors.gradients.push_back(updated.gradients[u]);
      for (std::size_t s = 0; s < tensors.state.size(); ++s) tensors.state[s].push_back(state_.arrays[s][i]);
      tensors.steps.push_back(++state_.steps[i]);
    }
    if (!tensors.parameters.empty()) rule.update_on_device(groups[group], tensors);
  }
  if (!state_.averages.empty()) average(updated);
  for (std::size_t u = 0; u < updated.index.size(); ++u)
    if (torch::Tensor parameter = state_.parameters[updated.index[u]]; is_16_bit(parameter))
      parameter.copy_(updated.values[u]);
  return true;
}

void DeviceUpdate::average(const Updated& updated) {
  std::vector<torch::Tensor> averages, values;
  for (std::size_t u = 0; u < updated.index.size(); ++u) {
    const std::size_t i = updated.index[u];
    if (state_.steps[i] == 1) {
      state_.averages[i].copy_(updated.values[u]);
    } else {
      averages.push_back(state_.averages[i]);
      values.push_back(updated.values[u]);
    }
  }
  if (!averages.empty()) at::_foreach_lerp_(averages, values, 1 - state_.ema_decay);
}

}  // namespace lockstep
