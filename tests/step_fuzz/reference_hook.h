// SPDX-License-Identifier: Apache-2.0
// tests/step_fuzz/reference_hook.h: what lossy communication hooks send, replayed for all ranks one after another in
// float64: top-k, two bits and PowerSGD with error feedback. Written from their papers and from
// lockstep/communication_hook.h.
#pragma once

#include <torch/types.h>

#include <vector>

#include "tests/step_fuzz/program.h"

namespace lockstep::fuzz {

class ReferenceHook {
 public:
  using Tensors = std::vector<torch::Tensor>;

  // parameters: all; exchanged: which of them go through buckets.
  ReferenceHook(const TrainerPlan& plan, const Tensors& parameters, const std::vector<size_t>& exchanged, int ranks);

  // given[rank][parameter]: what this rank adds to the sum; undefined: nothing. unit: divisor already applied. Returns
  // the sum as the hook transmits it; undefined for parameters that are not exchanged.
  Tensors sum_of(const std::vector<Tensors>& given, double unit);

  // The choice of what is sent, or a direction, hung on less than rounding: results can't be compared any more.
  bool undecided() const { return undecided_; }

 private:
  struct Bucket {
    std::vector<size_t> parameters;
    std::vector<torch::Tensor> residuals;  // flat, of each rank
    Tensors bases;                         // PowerSGD
  };

  torch::Tensor top_k(Bucket& bucket);
  torch::Tensor two_bits(Bucket& bucket);
  torch::Tensor power_sgd(Bucket& bucket, size_t number, const std::vector<torch::Tensor>& given);
  torch::Tensor product_of_rank_1(std::vector<torch::Tensor> matrices, torch::Tensor& basis);

  const TrainerPlan& plan_;
  Tensors parameters_;
  std::vector<Bucket> buckets_;
  double unit_ = 1;
  bool undecided_ = false;
};

}  // namespace lockstep::fuzz
