// SPDX-License-Identifier: Apache-2.0
// strategy/pipeline/add_in_place.h: adds the gradients of large matrices to .grad without a second matrix.
//
// autograd makes the gradient of each micro-batch as a tensor of its own and adds it to .grad. For a large embedding that is
// as much memory again as its gradient. While a LargeWeights guard lives, torch::linear and torch::embedding with a large
// weight get a backward that adds to .grad in place, from the second micro-batch on ("gradient accumulation fusion" in
// Megatron-LM). Weights with hooks are left to autograd, which calls them.
//
// Threads: as OperatorHandlerGuard; a weight's backward runs on one thread at a time
// Ranks:   no communication
#pragma once

#include "lockstep/model/operator_handler.h"

namespace lockstep {

class LargeWeights : public OperatorHandler {
 public:
  // From how many elements on a weight is large.
  explicit LargeWeights(std::int64_t large = std::int64_t{1} << 20) : large_(large) {}

  void call(const c10::OperatorHandle& op, Stack& stack) override;

 private:
  bool is_large(const at::Tensor& weight) const;

  std::int64_t large_;
};

}  // namespace lockstep
