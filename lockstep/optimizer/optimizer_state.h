// SPDX-License-Identifier: Apache-2.0
// optimizer/optimizer_state.h: the parameters of an optimizer and what it keeps beside each of them.
//
// Owns:    the arrays, together with what shares their memory
// Threads: one at a time
#pragma once

#include <torch/types.h>

#include <cstdint>
#include <vector>

namespace lockstep {

// Tensors of the parameter's shape and memory order, of float32 for 16-bit parameters. Where each rank has a slice of them:
// beside each part of it (gradient/gradient_slices.h).
struct OptimizerState {
  std::vector<torch::Tensor> parameters;  // each once, also if it has two names
  std::vector<std::size_t> group_of;      // the parameter group of each
  std::vector<std::int64_t> steps;        // updates so far
  std::vector<std::vector<torch::Tensor>>
      arrays;                           // [name][parameter or part], in the order of UpdateRule::state_names()
  std::vector<torch::Tensor> averages;  // with ema_decay
  std::vector<torch::Tensor> masters;   // the float32 originals of 16-bit parameters; else undefined
  double ema_decay = 0;                 // 0: no moving average
};

inline bool is_16_bit(const torch::Tensor& parameter) { return parameter.element_size() == 2; }

// The dtype of what an optimizer keeps beside a parameter.
inline torch::ScalarType state_dtype(const torch::Tensor& parameter) {
  return is_16_bit(parameter) ? torch::kFloat32 : parameter.scalar_type();
}

}  // namespace lockstep
