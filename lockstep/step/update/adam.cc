// SPDX-License-Identifier: Apache-2.0
// Adam, AdamW and LAMB. This source is compiled without errno from sqrt (lockstep/CMakeLists.txt): with it the loops would not be
// vectorised. They are compiled apart from their callers (noipa), so that the bits do not depend on those.
#include <ATen/ops/_fused_adam.h>
#include <ATen/ops/_fused_adamw.h>

#include <cmath>
#include <map>

#include "lockstep/step/update/rule.h"

namespace lockstep {
namespace {

const std::vector<std::string> kMoments = {"exp_avg", "exp_avg_sq"};

// The step's numbers, the same for every element.
template <class T>
struct AdamNumbers {
  T beta1, rest1;  // m = beta1 m + rest1 g;  rest1 = 1 - beta1, which T would round too much if taken from beta1
  T beta2, rest2;  // v = beta2 v + rest2 g^2
  T root;          // 1 / sqrt(1 - beta2^t)
  T rate;          // of m / (root sqrt(v) + eps)
  T eps;
  T decay = 0;  // Adam: g += decay p, before the moments; LAMB: direction += decay p
  T keep = 1;   // p = keep p - rate m / (root sqrt(v) + eps)
};

// Updates moments and parameters; or moments only, and turns the gradient into LAMB's direction.
template <bool kDirects, class T>
[[gnu::noipa]] void adam_update(const AdamNumbers<T>& numbers, const Elements<T>& elements) {
  const auto [count, parameter, gradient, state, step, trust, new_parameter, new_state] = elements;
  const AdamNumbers<T> n = numbers;
  const auto [average, square] = state;
  const auto [new_average, new_square] = new_state;
#pragma GCC ivdep
  for (std::int64_t i = 0; i < count; ++i) {
    const T g = kDirects ? gradient[i] : gradient[i] + n.decay * parameter[i];
    const T m = n.beta1 * average[i] + n.rest1 * g;
    const T v = n.beta2 * square[i] + n.rest2 * g * g;
    new_average[i] = m;
    new_square[i] = v;
    const T move = n.rate * m / (std::sqrt(v) * n.root + n.eps);
    if constexpr (kDirects)
      gradient[i] = move + n.decay * parameter[i];
    else
      new_parameter[i] = n.keep * parameter[i] - move;
  }
}

// step: from 1. lr: of the direction m / (sqrt(v) + eps), both corrected for bias. No weight decay.
template <class T>
AdamNumbers<T> adam_numbers(const auto& options, std::int64_t step, double lr) {
  const auto t = static_cast<double>(step);
  return {.beta1 = static_cast<T>(options.beta1),
          .rest1 = static_cast<T>(1 - options.beta1),
          .beta2 = static_cast<T>(options.beta2),
          .rest2 = static_cast<T>(1 - options.beta2),
          .root = static_cast<T>(1 / std::sqrt(1 - std::pow(options.beta2, t))),
          .rate = static_cast<T>(lr / (1 - std::pow(options.beta1, t))),
          .eps = static_cast<T>(options.eps)};
}

// libtorch's fused kernels take the step of each parameter as a tensor, which they only read: those at the same step share it.
std::vector<torch::Tensor> step_tensors(const WholeTensors& tensors) {
  const auto options = torch::TensorOptions(tensors.parameters.front().device()).dtype(torch::kFloat32);
  std::map<std::int64_t, torch::Tensor> at;
  std::vector<torch::Tensor> steps;
  for (const std::int64_t step : tensors.steps) {
    torch::Tensor& shared = at[step];
    if (!shared.defined()) shared = torch::full({}, static_cast<double>(step), options);
    steps.push_back(shared);
  }
  return steps;
}

// Adam adds weight decay to the gradient; AdamW applies it to the parameter.
template <class Options>
struct AdamRule : RuleWith<Options, AdamRule<Options>> {
  using RuleWith<Options, AdamRule>::RuleWith;
  static constexpr bool kDecoupled = std::is_same_v<Options, AdamWOptions>;

  template <class T>
  static void apply(const Options& options, const Elements<T>& elements) {
    auto numbers = adam_numbers<T>(options, elements.step, options.lr);
    if (kDecoupled)
      numbers.keep = static_cast<T>(1 - options.lr * options.weight_decay);
    else
      numbers.decay = static_cast<T>(options.weight_decay);
    adam_update</*kDirects=*/false>(numbers, elements);
  }

  static void apply_on_device(const Options& options, const WholeTensors& tensors) {
    const auto with = [&](const auto& fused) {
      fused(tensors.parameters, tensors.gradients, tensors.state[0], tensors.state[1], at::TensorList(),
            step_tensors(tensors), options.lr, options.beta1, options.beta2, options.weight_decay, options.eps,
            /*amsgrad=*/false, /*maximize=*/false, std::nullopt, std::nullopt);
    };
    if (kDecoupled)
      with([](const auto&... arguments) { at::_fused_adamw_(arguments...); });
    else
      with([](const auto&... arguments) { at::_fused_adam_(arguments...); });
  }
};

struct LAMBRule : RuleWith<LAMBOptions, LAMBRule> {
  using RuleWith::RuleWith;

  bool layerwise() const override { return true; }
  bool directs_with_state() const override { return true; }

  double trust_ratio(const Group&, double parameter_norm, double direction_norm) const override {
    return parameter_norm > 0 && direction_norm > 0 ? parameter_norm / direction_norm : 1;
  }

  template <class T>
  static void find_direction(const LAMBOptions& options, const Elements<T>& elements) {
    auto numbers = adam_numbers<T>(options, elements.step, /*lr=*/1);
    numbers.decay = static_cast<T>(options.weight_decay);
    adam_update</*kDirects=*/true>(numbers, elements);
  }

  template <class T>
  static void apply(const LAMBOptions& options, const Elements<T>& elements) {
    const T rate = static_cast<T>(options.lr * elements.trust);
    const auto [count, parameter, direction, state, step, trust, new_parameter, new_state] = elements;
#pragma GCC ivdep
    for (std::int64_t i = 0; i < count; ++i) new_parameter[i] = parameter[i] - rate * direction[i];
  }

  static void apply_on_device(const LAMBOptions& options, const WholeTensors& tensors) {
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
};

}  // namespace

std::unique_ptr<UpdateRule> rule_of(const AdamOptions& options) {
  return std::make_unique<AdamRule<AdamOptions>>(options, kMoments);
}
std::unique_ptr<UpdateRule> rule_of(const AdamWOptions& options) {
  return std::make_unique<AdamRule<AdamWOptions>>(options, kMoments);
}
std::unique_ptr<UpdateRule> rule_of(const LAMBOptions& options) {
  return std::make_unique<LAMBRule>(options, kMoments);
}

}  // namespace lockstep
