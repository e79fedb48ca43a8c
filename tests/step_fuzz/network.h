// SPDX-License-Identifier: Apache-2.0
// tests/step_fuzz/network.h: the model that every program trains, and its data: functions of an operation's id and of
// the rank, so that ranks and the reference compute with the same numbers.
#pragma once

#include <torch/nn/module.h>
#include <torch/torch.h>

#include "tests/step_fuzz/program.h"

namespace lockstep::fuzz {

inline torch::Tensor waves(torch::IntArrayRef sizes, double key) {
  const auto count = c10::multiply_integers(sizes);
  return torch::cos(torch::arange(count, torch::kFloat64) * 1.7 + key * 0.61).reshape(sizes);
}

enum Branch : unsigned { kWithoutSkip = 1, kWithoutFirstBias = 2, kWithoutSecondBias = 4 };

// y = tanh(x w1 + b1) w2 + b2 + x skip. Branches leave out b1, b2 or skip.
struct Network : torch::nn::Module {
  Network(const TrainerPlan& plan, int number) {
    const std::int64_t width = plan.wide ? 1400 : 4;
    const auto add = [&](const char* name, torch::IntArrayRef sizes) {
      const double key = 10.0 * number + static_cast<double>(weights.size());
      weights.push_back(register_parameter(name, (waves(sizes, key) * (plan.wide ? 0.05 : 0.5)).to(plan.dtype)));
    };
    add("w1", {3, width});
    add("b1", {width});
    add("w2", {width, 2});
    add("b2", {2});
    add("skip", {3, 2});
    if (plan.buffers) seen = register_buffer("seen", torch::zeros({2}, plan.dtype));
    for (int i = 0; i < kParameters; ++i)
      if (has(plan.frozen, i)) weights[static_cast<std::size_t>(i)].requires_grad_(false);
  }

  // The mean over samples of the squared error. break_backward: backward() throws halfway through.
  torch::Tensor loss(const torch::Tensor& x, const torch::Tensor& target, unsigned unused, bool break_backward) {
    if (seen.defined()) {
      const torch::NoGradGuard no_grad;
      seen.mul_(0.5).add_(x.mean());
    }
    torch::Tensor hidden = x.mm(weights[0]);
    if ((unused & kWithoutFirstBias) == 0) hidden = hidden + weights[1];
    hidden = hidden.tanh();
    if (break_backward && hidden.requires_grad())
      hidden.register_hook([](const torch::Tensor& gradient) -> torch::Tensor {
        TORCH_CHECK(!gradient.defined(), "thrown by the program in backward()");
        return gradient;
      });
    torch::Tensor y = hidden.mm(weights[2]);
    if ((unused & kWithoutSecondBias) == 0) y = y + weights[3];
    if ((unused & kWithoutSkip) == 0) y = y + x.mm(weights[4]);
    return (y - target).square().mean();
  }

  std::vector<torch::Tensor> weights;
  torch::Tensor seen;
};

struct Batch {
  torch::Tensor data;
  torch::Tensor target;
};

// The batch of one rank, and of one of its shards, rounded to `dtype` and given in `as`.
inline Batch batch_of(const Operation& operation, int rank, int shard, int samples, torch::ScalarType dtype,
                      torch::ScalarType as) {
  const double key = 1 + 31.0 * operation.id + 7.0 * rank + 3.0 * shard;
  return {waves({samples, 3}, key).to(dtype).to(as), waves({samples, 2}, key + 0.5).to(dtype).to(as)};
}

// What kLoadParameters writes.
inline torch::Tensor loaded_weight(const Operation& operation, std::size_t parameter, const TrainerPlan& plan,
                                   torch::IntArrayRef sizes) {
  const double key = 5.0 * operation.id + static_cast<double>(parameter);
  return (waves(sizes, key) * (plan.wide ? 0.05 : 0.4)).to(plan.dtype);
}

}  // namespace lockstep::fuzz
