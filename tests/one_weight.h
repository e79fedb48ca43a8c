// SPDX-License-Identifier: Apache-2.0
// tests/one_weight.h: a model of one weight, and what one rank makes of the batches of all ranks.
#pragma once

#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>
#include <torch/torch.h>

#include <vector>

namespace lockstep::testing {

// What one rank computes on the batches of all ranks, step by step.
inline torch::Tensor trained_alone(const std::vector<std::vector<torch::Tensor>>& steps) {
  const torch::Tensor w = torch::ones({3}, torch::kFloat64).set_requires_grad(true);
  for (const auto& batches : steps) {
    w.mutable_grad().reset();
    (torch::cat(batches).matmul(w)).square().mean().backward();
    const torch::NoGradGuard no_grad;
    w.sub_(w.grad(), 0.01);
  }
  return w.detach();
}

inline torch::Tensor batch_of_rank(int rank, int step, int64_t samples) {
  return torch::linspace(rank, rank + step + 1.0, 3 * samples, torch::kFloat64).view({samples, 3});
}

struct OneWeightImpl : torch::nn::Module {
  OneWeightImpl() { w = register_parameter("w", torch::ones({3}, torch::kFloat64)); }
  torch::Tensor loss(const torch::Tensor& data) { return data.matmul(w).square().mean(); }
  torch::Tensor w;
};
TORCH_MODULE(OneWeight);

}  // namespace lockstep::testing
