// SPDX-License-Identifier: Apache-2.0
#include "lockstep/step/update/rule.h"

namespace lockstep {
namespace {

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
    for (std::int64_t i = 0; i < count; ++i) {
      const T v = momentum * buffer[i] + rate * (gradient[i] + decay * parameter[i]);
      new_buffer[i] = v;
      new_parameter[i] = parameter[i] - v;
    }
  }

  static void apply_on_device(const LARSOptions& options, const WholeTensors& tensors) {
    const auto& [parameters, gradients, state, steps] = tensors;
    for (std::size_t i = 0; i < parameters.size(); ++i) {
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

std::unique_ptr<UpdateRule> rule_of(const LARSOptions& options) {
  return std::make_unique<LARSRule>(options, std::vector<std::string>{"momentum_buffer"});
}

}  // namespace lockstep
