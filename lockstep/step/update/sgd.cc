// SPDX-License-Identifier: Apache-2.0
#include <ATen/ops/_fused_sgd.h>

#include <algorithm>

#include "lockstep/step/update/rule.h"

namespace lockstep {
namespace {

enum class Momentum { kNone, kPlain, kNesterov };

template <Momentum kMomentum, class T>
void descend(const SGDOptions& options, const Elements<T>& elements) {
  const T lr = static_cast<T>(options.lr);
  const T decay = static_cast<T>(options.weight_decay);
  const T momentum = static_cast<T>(options.momentum);
  const auto [count, parameter, gradient, state, step, trust, new_parameter, new_state] = elements;
  const T* const buffer = state[0];
  T* const new_buffer = new_state[0];
#pragma GCC ivdep
  for (int64_t i = 0; i < count; ++i) {
    const T g = gradient[i] + decay * parameter[i];
    if constexpr (kMomentum == Momentum::kNone) {
      new_parameter[i] = parameter[i] - lr * g;
    } else {
      const T v = momentum * buffer[i] + g;
      new_buffer[i] = v;
      new_parameter[i] = parameter[i] - lr * (kMomentum == Momentum::kNesterov ? g + momentum * v : v);
    }
  }
  if (kMomentum == Momentum::kNone && buffer != new_buffer)
    std::copy_n(buffer, count, new_buffer);  // of other groups, with momentum
}

struct SGDRule : RuleWith<SGDOptions, SGDRule> {
  using RuleWith::RuleWith;

  template <class T>
  static void apply(const SGDOptions& options, const Elements<T>& elements) {
    if (options.momentum == 0) return descend<Momentum::kNone>(options, elements);
    require_momentum(elements.state[0] != nullptr);
    options.nesterov ? descend<Momentum::kNesterov>(options, elements) : descend<Momentum::kPlain>(options, elements);
  }

  static void apply_on_device(const SGDOptions& options, const WholeTensors& tensors) {
    if (options.momentum != 0) require_momentum(!tensors.state.empty());
    const Tensors buffers = tensors.state.empty() ? Tensors{} : tensors.state[0];
    at::_fused_sgd_(tensors.parameters, tensors.gradients, buffers, options.weight_decay, options.momentum, options.lr,
                    /*dampening=*/0, options.nesterov, /*maximize=*/false, /*is_first_step=*/false);
  }
};

struct LARSRule : RuleWith<LARSOptions, LARSRule> {
  using RuleWith::RuleWith;

  bool layerwise() const override { return true; }

  double trust_ratio(const Group& group, double parameter_norm, double gradient_norm) const override {
    const auto& options = options_of<LARSOptions>(group);
    if (parameter_norm == 0 || gradient_norm == 0) return 1;
    return options.trust * parameter_norm / (gradient_norm + options.weight_decay * parameter_norm);
  }

  template <class T>
  static void apply(const LARSOptions& options, const Elements<T>& elements) {
    const T rate = static_cast<T>(options.lr * elements.trust);
    const T momentum = static_cast<T>(options.momentum);
    const T decay = static_cast<T>(options.weight_decay);
    const auto [count, parameter, gradient, state, step, trust, new_parameter, new_state] = elements;
    const T* const buffer = state[0];
    T* const new_buffer = new_state[0];
#pragma GCC ivdep
    for (int64_t i = 0; i < count; ++i) {
      const T v = momentum * buffer[i] + rate * (gradient[i] + decay * parameter[i]);
      new_buffer[i] = v;
      new_parameter[i] = parameter[i] - v;
    }
  }

  static void apply_on_device(const LARSOptions& options, const WholeTensors& tensors) {
    const auto& [parameters, gradients, state, steps] = tensors;
    for (size_t i = 0; i < parameters.size(); ++i) {
      const torch::Tensor p = parameters[i].norm();
      const torch::Tensor g = gradients[i].norm();
      const torch::Tensor decayed = gradients[i] + options.weight_decay * parameters[i];
      const torch::Tensor ratio =
          torch::where((p > 0) & (g > 0), options.trust * p / (g + options.weight_decay * p), 1.0);
      state[0][i].mul_(options.momentum).add_(ratio * decayed, options.lr);
      parameters[i].sub_(state[0][i]);
    }
  }
};

}  // namespace

std::unique_ptr<UpdateRule> rule_of(const SGDOptions& options) {
  std::vector<std::string> state_names;
  if (options.momentum != 0) state_names.push_back("momentum_buffer");
  return std::make_unique<SGDRule>(options, std::move(state_names));
}
std::unique_ptr<UpdateRule> rule_of(const LARSOptions& options) {
  return std::make_unique<LARSRule>(options, std::vector<std::string>{"momentum_buffer"});
}

}  // namespace lockstep
