// SPDX-License-Identifier: Apache-2.0
// Adam, AdamW, LAMB, RMSprop and Adagrad. This source is compiled without errno from sqrt (lockstep/CMakeLists.txt):
// with it the loops would not be vectorised. They are compiled apart from their callers (noipa), so that the bits do
// not depend on those.
#include <ATen/ops/_foreach_add.h>
#include <ATen/ops/_foreach_addcdiv.h>
#include <ATen/ops/_foreach_addcmul.h>
#include <ATen/ops/_foreach_mul.h>
#include <ATen/ops/_foreach_sqrt.h>
#include <ATen/ops/_fused_adam.h>
#include <ATen/ops/_fused_adamw.h>

#include <algorithm>
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
  for (int64_t i = 0; i < count; ++i) {
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
AdamNumbers<T> adam_numbers(const auto& options, int64_t step, double lr) {
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
Tensors step_tensors(const WholeTensors& tensors) {
  const auto options = torch::TensorOptions(tensors.parameters.front().device()).dtype(torch::kFloat32);
  std::map<int64_t, torch::Tensor> at;
  Tensors steps;
  for (const int64_t step : tensors.steps) {
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
    for (int64_t i = 0; i < count; ++i) new_parameter[i] = parameter[i] - rate * direction[i];
  }

  static void apply_on_device(const LAMBOptions& options, const WholeTensors& tensors) {
    const auto& [parameters, gradients, state, steps] = tensors;
    for (size_t i = 0; i < parameters.size(); ++i) {
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

namespace {

// square = keep square + add g^2;  v = momentum v + g / (sqrt(square) + eps);  p -= rate v
template <class T>
struct Numbers {
  T keep, add, decay, momentum, eps, rate;
};

template <bool kMomentum, class T>
[[gnu::noipa]] void scale_by_root(const Numbers<T>& numbers, const Elements<T>& elements) {
  const auto [count, parameter, gradient, state, step, trust, new_parameter, new_state] = elements;
  const Numbers<T> n = numbers;
  const auto [square, buffer] = state;
  const auto [new_square, new_buffer] = new_state;
#pragma GCC ivdep
  for (int64_t i = 0; i < count; ++i) {
    const T g = gradient[i] + n.decay * parameter[i];
    const T s = n.keep * square[i] + n.add * g * g;
    T v = g / (std::sqrt(s) + n.eps);
    if constexpr (kMomentum) {
      v += n.momentum * buffer[i];
      new_buffer[i] = v;
    }
    new_square[i] = s;
    new_parameter[i] = parameter[i] - n.rate * v;
  }
}

template <class T, class Options>
Numbers<T> numbers_of(const Options& options, double keep, double add, double rate) {
  return {.keep = static_cast<T>(keep),
          .add = static_cast<T>(add),
          .decay = static_cast<T>(options.weight_decay),
          .momentum = 0,
          .eps = static_cast<T>(options.eps),
          .rate = static_cast<T>(rate)};
}

// g, with weight decay, and sqrt(square) + eps of each parameter, whose squares are brought up to date.
struct Scaled {
  Tensors gradients, roots;
};
Scaled scaled_on_device(const auto& options, const WholeTensors& tensors, double keep, double add) {
  const auto& squares = tensors.state[0];
  Scaled scaled{.gradients = at::_foreach_add(tensors.gradients, tensors.parameters, options.weight_decay),
                .roots = {}};
  if (keep != 1) at::_foreach_mul_(squares, keep);
  at::_foreach_addcmul_(squares, scaled.gradients, scaled.gradients, add);
  scaled.roots = at::_foreach_sqrt(squares);
  at::_foreach_add_(scaled.roots, options.eps);
  return scaled;
}

struct RMSpropRule : RuleWith<RMSpropOptions, RMSpropRule> {
  using RuleWith::RuleWith;

  template <class T>
  static void apply(const RMSpropOptions& options, const Elements<T>& elements) {
    auto numbers = numbers_of<T>(options, options.alpha, 1 - options.alpha, options.lr);
    numbers.momentum = static_cast<T>(options.momentum);
    if (options.momentum != 0) require_momentum(elements.state[1] != nullptr);
    if (options.momentum != 0) return scale_by_root</*kMomentum=*/true>(numbers, elements);
    scale_by_root</*kMomentum=*/false>(numbers, elements);
    if (elements.state[1] != elements.new_state[1])
      std::copy_n(elements.state[1], elements.count, elements.new_state[1]);  // of other groups, with momentum
  }

  static void apply_on_device(const RMSpropOptions& options, const WholeTensors& tensors) {
    const auto [gradients, roots] = scaled_on_device(options, tensors, options.alpha, 1 - options.alpha);
    if (options.momentum == 0) return at::_foreach_addcdiv_(tensors.parameters, gradients, roots, -options.lr);
    require_momentum(tensors.state.size() > 1);
    at::_foreach_mul_(tensors.state[1], options.momentum);
    at::_foreach_addcdiv_(tensors.state[1], gradients, roots);
    at::_foreach_add_(tensors.parameters, tensors.state[1], -options.lr);
  }
};

struct AdagradRule : RuleWith<AdagradOptions, AdagradRule> {
  using RuleWith::RuleWith;

  static double rate(const AdagradOptions& options, int64_t step) {
    return options.lr / (1 + static_cast<double>(step - 1) * options.lr_decay);
  }

  template <class T>
  static void apply(const AdagradOptions& options, const Elements<T>& elements) {
    scale_by_root</*kMomentum=*/false>(numbers_of<T>(options, 1, 1, rate(options, elements.step)), elements);
  }

  static void apply_on_device(const AdagradOptions& options, const WholeTensors& tensors) {
    const auto [gradients, roots] = scaled_on_device(options, tensors, 1, 1);
    for (size_t i = 0; i < gradients.size(); ++i)
      tensors.parameters[i].addcdiv_(gradients[i], roots[i], -rate(options, tensors.steps[i]));
  }
};

}  // namespace

std::unique_ptr<UpdateRule> rule_of(const RMSpropOptions& options) {
  std::vector<std::string> state_names = {"square_avg"};
  if (options.momentum != 0) state_names.push_back("momentum_buffer");
  return std::make_unique<RMSpropRule>(options, std::move(state_names));
}
std::unique_ptr<UpdateRule> rule_of(const AdagradOptions& options) {
  return std::make_unique<AdagradRule>(options, std::vector<std::string>{"sum"});
}

}  // namespace lockstep
