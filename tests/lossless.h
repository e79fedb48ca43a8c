// SPDX-License-Identifier: Apache-2.0
// tests/lossless.h: every way to train that must give what one rank gives on the same global batch, as runs of 20 steps
// in float64. Run with ranks as threads (strategy/lossless_test.cc) and as processes (tests/train/lossless_ranks.cc).
#pragma once

#include <torch/nn/init.h>
#include <torch/nn/modules/conv.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/adam.h>

#include <algorithm>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "lockstep/ddp.h"
#include "lockstep/sampler.h"
#include "lockstep/sync_batch_norm.h"
#include "tests/strategies.h"

namespace lockstep::testing {

using Courses = std::map<std::string, std::vector<torch::Tensor>>;  // by option: the parameters afterwards

inline std::vector<torch::Tensor> strategy_course(World& world, StrategyOptions options) {
  options.kind = StrategyKind::kDdp;
  options.seed = 4;
  const auto strategy = make_strategy(world, small_task(), options);
  for (int step = 0; step < kSteps; ++step) {
    strategy->forward_backward(part_of(batch_of(step), world));
    strategy->update();
  }
  std::vector<torch::Tensor> values = values_of(strategy->model());
  for (const torch::Tensor& parameter : strategy->model().parameters())
    for (const auto& [name, tensor] : strategy->optimizer().state_of(parameter))
      values.push_back(tensor.detach().clone());
  return values;
}

// Words with sparse gradients, a convolution with synchronised batch norm, tied weights, a frozen parameter, an empty
// one, and a branch that some steps take only.
struct OddNetImpl : torch::nn::Module {
  OddNetImpl(const World& world, bool normalises, bool sparse) : normalises_(normalises) {
    words = register_module("words", torch::nn::Embedding(torch::nn::EmbeddingOptions(12, 6).sparse(sparse)));
    conv = register_module("conv", torch::nn::Conv1d(1, 2, 3));
    norm = register_module("norm", SyncBatchNorm(world, SyncBatchNormOptions{.features = 2}));
    first = register_module("first", torch::nn::Linear(8, 8));
    tied = register_parameter("tied", first->weight);
    frozen = register_parameter("frozen", torch::full({8}, 2.0), /*requires_grad=*/false);
    empty = register_parameter("empty", torch::empty({0, 3}));
    branch = register_module("branch", torch::nn::Linear(8, 8));
    last = register_module("last", torch::nn::Linear(8, 4));
    to(torch::kFloat64);
    const torch::Tensor value = torch::linspace(-0.5, 0.5, 101, torch::kFloat64);
    const torch::NoGradGuard no_grad;
    int64_t begin = 0;
    for (torch::Tensor& p : parameters()) {
      if (!p.requires_grad()) continue;
      p.copy_(value.index({torch::arange(begin, begin + p.numel()).remainder(101)}).view(p.sizes()));
      ++begin;
    }
  }

  torch::Tensor forward(const torch::Tensor& data, int step) {
    const torch::Tensor tokens = data.abs().mul(3).to(torch::kInt64).remainder(12);
    const torch::Tensor seen = words(tokens).mean(1) + data;
    const torch::Tensor channels = conv(seen.unsqueeze(1));
    torch::Tensor hidden = (normalises_ ? norm(channels) : channels).flatten(1).tanh();
    hidden = torch::linear(first(hidden).tanh(), tied) * frozen;
    if (step % 3 == 0) hidden = hidden + branch(hidden);
    return last(hidden.tanh());
  }

  torch::nn::Embedding words{nullptr};
  torch::nn::Conv1d conv{nullptr};
  SyncBatchNorm norm{nullptr};
  torch::nn::Linear first{nullptr}, branch{nullptr}, last{nullptr};
  torch::Tensor tied, frozen, empty;

 private:
  bool normalises_;  // over the batch of one forward: not where a step has several
};
TORCH_MODULE(OddNet);

struct DdpCase {
  DistributedDataParallelOptions options = {};
  int parts = 1;     // of each rank's batch: all but the last under no_sync
  bool ours = true;  // a lockstep optimizer, or one of torch's
};

inline void backward_in_parts(DistributedDataParallel& ddp, OddNet& net, const Batch& mine, int parts, int step) {
  for (int part = 0; part < parts; ++part) {
    const Range range = even_part(mine.size(), part, parts);
    const torch::Tensor data = mine.data.slice(0, range.begin, range.end),
                        target = mine.target.slice(0, range.begin, range.end);
    const torch::Tensor loss = torch::cross_entropy_loss(net->forward(data, step), target) / parts;
    if (part + 1 == parts) return ddp.backward(loss, range.end - range.begin);
    const auto only_add = ddp.no_sync();
    ddp.backward(loss, range.end - range.begin);
  }
}

inline std::vector<torch::Tensor> ddp_course(World& world, const DdpCase& one) {
  OddNet net(world, /*normalises=*/one.parts == 1, /*sparse=*/one.ours);
  SGD sgd(net->parameters(), {.lr = 0.05, .momentum = 0.9});
  torch::optim::Adam adam(net->parameters(), 1e-3);
  torch::optim::Optimizer& optimizer = one.ours ? static_cast<torch::optim::Optimizer&>(sgd) : adam;
  DistributedDataParallel ddp(world, *net, optimizer, one.options);
  for (int step = 0; step < kSteps; ++step) {
    backward_in_parts(ddp, net, part_of(batch_of(step, 28), world), one.parts, step);
    optimizer.step();
    optimizer.zero_grad();
  }
  return values_of(*net);
}

inline Courses lossless_courses(World& world) {
  Courses courses;
  const std::map<std::string, StrategyOptions> strategies = {
      {"sgd", {.optimizer = SGDOptions{.lr = 0.05}}},
      {"sgd, nesterov, weight decay",
       {.optimizer = SGDOptions{.lr = 0.05, .momentum = 0.9, .nesterov = true, .weight_decay = 0.01}}},
      {"adam", {.optimizer = AdamOptions{}}},
      {"adamw", {.optimizer = AdamWOptions{}}},
      {"lamb, clipped", {.optimizer = LAMBOptions{}, .clipping = {.max_norm = 0.5}}},
      {"lars, clipped", {.optimizer = LARSOptions{}, .clipping = {.max_norm = 0.5, .max_value = 0.1}}},
      {"rmsprop", {.optimizer = RMSpropOptions{.momentum = 0.9}}},
      {"adagrad", {.optimizer = AdagradOptions{}}},
      {"accumulated", {.optimizer = SGDOptions{.lr = 0.05}, .accumulate = 3}},  // some ranks have fewer samples
      {"average of the parameters", {.optimizer = SGDOptions{.lr = 0.05}, .ema_decay = 0.9}},
      {"lamb on separate parameters",
       {.optimizer = LAMBOptions{}, .clipping = {.max_norm = 0.5}, .ddp = {.share_parameters = false}}}};
  for (const auto& [name, options] : strategies) courses[name] = strategy_course(world, options);
  const std::map<std::string, DdpCase> cases = {
      {"shared parameters", {}},
      {"shared parameters, mean in .grad", {.options = {.mean_in_grad = true}}},
      {"separate parameters", {.options = {.share_parameters = false}}},
      {"small buckets", {.options = {.bucket_bytes = 100, .share_parameters = false}}},
      {"bucket views", {.options = {.share_parameters = false, .gradient_as_bucket_view = true}}},
      {"no_sync", {.parts = 2}},
      {"no_sync on separate parameters", {.options = {.share_parameters = false}, .parts = 2}},
      {"an optimizer of torch", {.ours = false}}};
  for (const auto& [name, one] : cases) courses[name] = ddp_course(world, one);
  return courses;
}

// Parameters and state within 1e-9 of each tensor's norm.
inline void expect_same_courses(const Courses& many, const Courses& one) {
  ASSERT_EQ(many.size(), one.size());
  for (const auto& [name, tensors] : one) {
    ASSERT_EQ(many.at(name).size(), tensors.size()) << name;
    for (size_t i = 0; i < tensors.size(); ++i) {
      const double difference = (many.at(name)[i] - tensors[i]).norm().item<double>();
      EXPECT_LE(difference, 1e-9 * tensors[i].norm().item<double>()) << name << ", tensor " << i;
    }
  }
}

}  // namespace lockstep::testing
