// SPDX-License-Identifier: Apache-2.0
// tests/step_fuzz/network.h: the model that every program trains, and its data: functions of an operation's id and of
// the rank, so that ranks and the reference compute with the same numbers.
#pragma once

#include <torch/nn/module.h>
#include <torch/torch.h>

#include <functional>
#include <vector>

#include "tests/step_fuzz/program.h"

namespace lockstep::fuzz {

inline torch::Tensor waves(torch::IntArrayRef sizes, double key) {
  const auto count = c10::multiply_integers(sizes);
  return torch::cos(torch::arange(count, torch::kFloat64) * 1.7 + key * 0.61).reshape(sizes);
}

enum Branch : unsigned { kWithoutSkip = 1, kWithoutFirstBias = 2, kWithoutSecondBias = 4, kWithoutWords = 8 };
inline constexpr size_t kWords = 5;      // the parameter of the embedding, if there is one
inline constexpr double kNormEps = 0.1;  // far above rounding

// A batch of one rank, or of one of its shards; and what its loss leaves out.
struct Part {
  torch::Tensor data;
  torch::Tensor target;
  torch::Tensor words;  // rows of the embedding
  unsigned unused = 0;
  bool break_backward = false;  // backward() throws halfway through
};

// y = norm(tanh((x + embedding) w1 + b1)) w2 + b2 + x skip. Branches leave out b1, b2, skip or the embedding.
struct Network : torch::nn::Module {
  Network(const TrainerPlan& plan, int number, bool sparse) : sparse_(sparse) {
    const int64_t width = width_of(plan);
    const auto add = [&](const char* name, torch::IntArrayRef sizes) {
      const double key = 10.0 * number + static_cast<double>(weights.size());
      weights.push_back(register_parameter(name, (waves(sizes, key) * (plan.wide ? 0.05 : 0.5)).to(plan.dtype)));
    };
    add("w1", {3, width});
    add("b1", {width});
    add("w2", {width, 2});
    add("b2", {2});
    add("skip", {3, 2});
    if (plan.words) add("words", {5, 3});
    if (plan.buffers) seen_ = stats.emplace_back(register_buffer("seen", torch::zeros({2}, plan.dtype)));
  }

  static int64_t width_of(const TrainerPlan& plan) { return plan.wide ? 1400 : 4; }

  // norm: torch::nn::BatchNorm1d or lockstep::SyncBatchNorm.
  template <class Module>
  void add_norm(const Module& norm, const TrainerPlan& plan) {
    register_module("norm", norm)->to(plan.dtype);
    weights.insert(weights.end(), {norm->weight, norm->bias});
    stats.insert(stats.end(), {norm->running_mean, norm->running_var});
    normalise_ = [module = norm.ptr()](const torch::Tensor& hidden) { return module->forward(hidden); };
  }

  void freeze(unsigned frozen) {
    for (size_t i = 0; i < weights.size(); ++i)
      if (has(frozen, static_cast<int>(i))) weights[i].requires_grad_(false);
  }

  // Of each part the mean over its samples of the squared error. All parts are normalised together.
  std::vector<torch::Tensor> losses(const std::vector<Part>& parts) {
    note_seen(parts.front().data);
    std::vector<torch::Tensor> hidden, all;
    std::vector<int64_t> samples;
    for (const Part& part : parts) {
      hidden.push_back(hidden_of(part));
      samples.push_back(part.data.size(0));
    }
    if (normalise_) hidden = normalise_(torch::cat(hidden)).split_with_sizes(samples);
    for (size_t i = 0; i < parts.size(); ++i) all.push_back(loss_of(parts[i], hidden[i]));
    return all;
  }

  std::vector<torch::Tensor> weights;
  std::vector<torch::Tensor> stats;  // buffers of floating point

 private:
  void note_seen(const torch::Tensor& x) {
    const torch::NoGradGuard no_grad;
    if (seen_.defined()) seen_.mul_(0.5).add_(x.mean());
  }

  torch::Tensor with_words(const Part& part) const {
    if (weights.size() <= kWords || !part.words.defined() || (part.unused & kWithoutWords) != 0) return part.data;
    return part.data + torch::embedding(weights[kWords], part.words, -1, false, sparse_);
  }

  torch::Tensor hidden_of(const Part& part) const {
    torch::Tensor hidden = with_words(part).mm(weights[0]);
    if ((part.unused & kWithoutFirstBias) == 0) hidden = hidden + weights[1];
    hidden = hidden.tanh();
    if (part.break_backward && hidden.requires_grad())
      hidden.register_hook([](const torch::Tensor& gradient) -> torch::Tensor {
        TORCH_CHECK(!gradient.defined(), "thrown by the program in backward()");
        return gradient;
      });
    return hidden;
  }

  torch::Tensor loss_of(const Part& part, const torch::Tensor& hidden) const {
    torch::Tensor y = hidden.mm(weights[2]);
    if ((part.unused & kWithoutSecondBias) == 0) y = y + weights[3];
    if ((part.unused & kWithoutSkip) == 0) y = y + part.data.mm(weights[4]);
    return (y - part.target).square().mean();
  }

  bool sparse_;
  torch::Tensor seen_;
  std::function<torch::Tensor(const torch::Tensor&)> normalise_;
};

// The batch of one rank, and of one of its shards, rounded to the dtype of the plan and given in `as`.
inline Part part_of(const Operation& operation, int rank, int shard, int samples, const TrainerPlan& plan,
                    torch::ScalarType as) {
  const double key = 1 + 31.0 * id_of(operation, rank) + 7.0 * rank + 3.0 * shard;
  const auto given = [&](torch::IntArrayRef sizes, double of) { return waves(sizes, of).to(plan.dtype).to(as); };
  Part part{.data = given({samples, 3}, key),
            .target = given({samples, 2}, key + 0.5),
            .unused = operation.unused[static_cast<size_t>(rank)]};
  if (plan.words) part.words = (waves({samples}, key + 0.7) * 2.4 + 2.5).to(torch::kInt64);
  return part;
}

// What kLoadParameters writes.
inline torch::Tensor loaded_weight(const Operation& operation, size_t parameter, const TrainerPlan& plan,
                                   torch::IntArrayRef sizes) {
  const double key = 5.0 * operation.id + static_cast<double>(parameter);
  return (waves(sizes, key) * (plan.wide ? 0.05 : 0.4)).to(plan.dtype);
}

}  // namespace lockstep::fuzz
