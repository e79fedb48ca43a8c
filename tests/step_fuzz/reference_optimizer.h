// SPDX-License-Identifier: Apache-2.0
// tests/step_fuzz/reference_optimizer.h: the optimizer of the reference: torch's own; LAMB and LARS, which torch does not
// have, written from their papers with whole tensors.
#pragma once

#include <torch/optim/optimizer.h>
#include <torch/types.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "tests/step_fuzz/program.h"

namespace lockstep::fuzz {

inline constexpr double kAdamEps = 1e-3, kLarsTrust = 0.5;

class ReferenceOptimizer {
 public:
  virtual ~ReferenceOptimizer() = default;
  virtual void step() = 0;  // from .grad
  virtual void set_lr(double lr) = 0;

  // Remembers the state, but not the learning rate; the function that it returns writes it back.
  virtual std::function<void(ReferenceOptimizer&)> saved() = 0;
};

std::unique_ptr<ReferenceOptimizer> make_reference_optimizer(const TrainerPlan& plan,
                                                             const std::vector<torch::Tensor>& parameters);

// torch's optimizer of this plan.
std::shared_ptr<torch::optim::Optimizer> make_torch_optimizer(const TrainerPlan& plan,
                                                              const std::vector<torch::Tensor>& parameters);

// Its whole state, to be given to load_state().
std::string state_of(const torch::optim::Optimizer& optimizer);
void load_state(torch::optim::Optimizer& optimizer, const std::string& state, double lr);
void load_other_state(torch::optim::Optimizer& optimizer);  // three times the momentum that it has

}  // namespace lockstep::fuzz
