// SPDX-License-Identifier: Apache-2.0
// strategy/pipeline/add_in_place.h: adds the gradients of large weights to .grad without a second tensor of their size.
//
// autograd makes the gradient of each micro-batch as a tensor of its own and adds it to .grad. For a large embedding
// that is as much memory again as its gradient. While a LargeWeights guard lives, torch::linear, torch::embedding and
// torch::conv2d with a large weight get a backward that adds to .grad in place, from the second micro-batch on
// ("gradient accumulation fusion" in Megatron-LM); that of a convolution is made in parts. Weights with hooks are left
// to autograd, which calls them.
//
// Threads: as OperatorHandlerGuard; a weight's backward runs on one thread at a time
// Ranks:   no communication
#pragma once

#include "lockstep/model/operator_handler.h"
#include "lockstep/named_tensor.h"

namespace lockstep {

class LargeWeights : public OperatorHandler {
 public:
  // `large`: the elements from which on a weight is large.
  explicit LargeWeights(int64_t large = int64_t{1} << 18) : large_(large) {}

  void call(const c10::OperatorHandle& op, Stack& stack) override;

 private:
  bool is_large(const at::Tensor& weight, int64_t dimensions) const;

  int64_t large_;
};

}  // namespace lockstep
