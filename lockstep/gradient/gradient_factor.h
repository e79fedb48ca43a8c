// SPDX-License-Identifier: Apache-2.0
// gradient/gradient_factor.h: multiplies the gradients of a backward() that runs elsewhere, so that batches of different
// sizes sum exactly, and those of an empty batch, which may be NaN, count as zero.
//
// Flow:    set() -> autograd calls hooks of the parameters, before it adds to .grad
// Owns:    its hooks, from the first factor other than 1 on
// Threads: set() while no gradient is computed
// Ranks:   no communication
#pragma once

#include <memory>
#include <vector>

#include "lockstep/named_tensor.h"

namespace lockstep {

class GradientFactor {
 public:
  explicit GradientFactor(std::vector<NamedTensor> parameters) : parameters_(std::move(parameters)) {}

  // From now on. 0: gradients become zeros, whatever they are.
  void set(double factor);

 private:
  std::vector<NamedTensor> parameters_;
  std::shared_ptr<double> factor_;  // made with the hooks, which may outlive this
};

}  // namespace lockstep
