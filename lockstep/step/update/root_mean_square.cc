// SPDX-License-Identifier: Apache-2.0
// RMSprop and Adagrad. Compiled as adam.cc is, for the same reasons.
#include <ATen/ops/_foreach_add.h>
#include <ATen/ops/_foreach_addcdiv.h>
#include <ATen/ops/_foreach_addcmul.h>
#include <ATen/ops/_foreach_mul.h>
#include <ATen/ops/_foreach_sqrt.h>

#include <algorithm>
#include <cmath>

#include "lockstep/step/update/rule.h"

namespace lockstep {
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
  for (std::int64_t i = 0; i < count; ++i) {
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
  std::vector<torch::Tensor> gradients, roots;
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

  static double rate(const AdagradOptions& options, std::int64_t step) {
    return options.lr / (1 + static_cast<double>(step - 1) * options.lr_decay);
  }

  template <class T>
  static void apply(const AdagradOptions& options, const Elements<T>& elements) {
    scale_by_root</*kMomentum=*/false>(numbers_of<T>(options, 1, 1, rate(options, elements.step)), elements);
  }

  static void apply_on_device(const AdagradOptions& options, const WholeTensors& tensors) {
    const auto [gradients, roots] = scaled_on_device(options, tensors, 1, 1);
    for (std::size_t i = 0; i < gradients.size(); ++i)
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
