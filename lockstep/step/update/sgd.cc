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
  for (std::int64_t i = 0; i < count; ++i) {
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
    const std::vector<torch::Tensor> buffers = tensors.state.empty() ? std::vector<torch::Tensor>{} : tensors.state[0];
    at::_fused_sgd_(tensors.parameters, tensors.gradients, buffers, options.weight_decay, options.momentum, options.lr,
                    /*dampening=*/0, options.nesterov, /*maximize=*/false, /*is_first_step=*/false);
  }
};

}  // namespace

std::unique_ptr<UpdateRule> rule_of(const SGDOptions& options) {
  std::vector<std::string> state_names;
  if (options.momentum != 0) state_names.push_back("momentum_buffer");
  return std::make_unique<SGDRule>(options, std::move(state_names));
}

}  // namespace lockstep
