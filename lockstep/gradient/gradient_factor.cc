// SPDX-License-Identifier: Apache-2.0
#include "lockstep/gradient/gradient_factor.h"

#include <torch/types.h>

namespace lockstep {

void GradientFactor::set(double factor) {
  if (factor_ == nullptr && factor == 1) return;
  if (factor_ == nullptr) {
    factor_ = std::make_shared<double>();
    for (const auto& [name, parameter] : parameters_) {
      if (!parameter.requires_grad()) continue;
      parameter.register_hook([held = factor_](const torch::Tensor& gradient) -> torch::Tensor {
        const double by = *held;
        if (by == 1) return gradient;
        return by == 0 ? torch::zeros_like(gradient) : gradient * by;
      });
    }
  }
  *factor_ = factor;
}

}  // namespace lockstep
