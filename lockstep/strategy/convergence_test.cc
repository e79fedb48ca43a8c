// SPDX-License-Identifier: Apache-2.0
// Training that is not exact must still converge. (Lossy hooks: step/communication_hook_test.cc.)
#include "lockstep/models.h"
#include "lockstep/strategy.h"
#include "lockstep/strategy/devices/replica.h"
#include "tests/support.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Parallel.h>

namespace lockstep {
namespace {

constexpr int kStepsToLearn = 100;

// Sixteen samples to memorise.
Batch known_batch() {
  const auto generator = at::make_generator<at::CPUGeneratorImpl>(uint64_t{9});
  return {torch::randn({16, 20}, generator), torch::randint(0, 10, {16}, generator, torch::kInt64)};
}

struct Learned {
  double first_loss = 0;
  double last_loss = 0;
  torch::Tensor weight;
};

Learned learn(int ranks, const StrategyOptions& options) {
  Learned learned;
  run_ranks(ranks, [&](World& world) {
    at::set_num_threads(1);
    const auto strategy =
        make_strategy(world, classification_task<MLP>("mlp", MLPOptions{.inputs = 20, .hidden = {64}}), options);
    const Batch part = part_of(known_batch(), world.rank(), world.size());
    std::vector<double> losses;
    for (int step = 0; step < kStepsToLearn; ++step) {
      losses.push_back(strategy->forward_backward(part).mean_loss);
      strategy->update();
    }
    strategy->synchronise();
    if (world.rank() == 0)
      learned = {losses.front(), losses.back(), strategy->model().parameters()[0].detach().clone()};
    world.barrier();
  });
  return learned;
}

const StrategyOptions kDdp{.optimizer = SGDOptions{.lr = 0.05, .momentum = 0.9}, .seed = 2};

TEST(Convergence, sixteen_bits_converge_as_float32_does) {
  StrategyOptions options = kDdp;
  const Learned exact = learn(2, options);
  EXPECT_LT(exact.last_loss, 0.01 * exact.first_loss);
  for (const Precision precision : {Precision::kBFloat16, Precision::kFloat16}) {
    options.precision = precision;
    const Learned rounded = learn(2, options);
    EXPECT_LT(rounded.last_loss, 0.015 * rounded.first_loss);  // float16 leaves out the first steps
    EXPECT_NEAR(rounded.first_loss, exact.first_loss, 0.01);
    EXPECT_EQ(rounded.weight.scalar_type(), torch::kFloat32);
    EXPECT_FALSE(torch::allclose(rounded.weight, exact.weight, 1e-4, 1e-4)) << "nothing was rounded";
  }
}

// The gradient of each weight is half the input.
Task two_outputs() {
  return {
      .make_model = [] { return torch::nn::Linear(1, 2).ptr(); },
      .forward = [](torch::nn::Module& model,
                    const torch::Tensor& data) { return dynamic_cast<torch::nn::LinearImpl&>(model).forward(data); },
      .loss = [](const torch::Tensor& output, const torch::Tensor&) { return output.mean(); }};
}

const StrategyOptions kScaled{.optimizer = SGDOptions{.lr = 0.5}, .seed = 1, .precision = Precision::kFloat16};

// Returns by how much the weights have changed.
double change_in_step(Strategy& strategy, double input) {
  const torch::Tensor weight = strategy.model().parameters()[0], before = weight.detach().clone();
  strategy.forward_backward({torch::full({1, 1}, input), torch::zeros({1})});
  strategy.update();
  return (before - weight.detach()).max().item<double>();
}

TEST(Float16, a_step_that_overflows_on_one_rank_changes_nothing_on_any) {
  run_ranks(3, [](World& world) {
    const auto strategy = make_strategy(world, two_outputs(), kScaled);
    EXPECT_EQ(change_in_step(*strategy, world.rank() == 1 ? 100 : 1), 0);
    EXPECT_NEAR(change_in_step(*strategy, 1), 0.25, 1e-3);
    world.barrier();
  });
}

TEST(Float16, goes_on_from_a_checkpoint_with_the_loss_scale_that_was_saved) {
  const World world = World::single();
  const auto first = make_strategy(world, two_outputs(), kScaled);
  EXPECT_EQ(change_in_step(*first, 3), 0);  // at 65536, no longer at 32768
  const auto second = make_strategy(world, two_outputs(), kScaled);
  torch::Tensor(second->state().at(0).tensor).copy_(first->state().at(0).tensor);
  second->restored(1);
  EXPECT_NEAR(change_in_step(*second, 3), 0.75, 1e-3);
}

TEST(Float16, is_refused_where_the_loss_is_not_scaled) {
  StrategyOptions options = kScaled;
  for (const StrategyInfo& info : strategies()) {
    options.kind = info.kind;
    if (info.kind == StrategyKind::kSingle || info.kind == StrategyKind::kDdp) continue;
    EXPECT_THROW(make_strategy(World::single(), two_outputs(), options), UsageError) << info.name;
  }
  options.kind = StrategyKind::kDdp;
  options.compression.kind = Compression::kPowerSGD;  // keeps a residual
  EXPECT_THROW(make_strategy(World::single(), two_outputs(), options), UsageError);
}

TEST(Convergence, local_steps_converge) {
  for (const int every : {1, 4}) {
    const Learned learned = learn(2, {.kind = StrategyKind::kAveraging,
                                      .optimizer = SGDOptions{.lr = 0.05, .momentum = 0.9},
                                      .seed = 2,
                                      .averaging = {.every = every}});
    EXPECT_LT(learned.last_loss, 0.1 * learned.first_loss) << "averaged every " << every;
  }
}

TEST(Convergence, an_outer_step_with_momentum_converges) {
  const Learned learned = learn(2, {.kind = StrategyKind::kAveraging,
                                    .optimizer = SGDOptions{.lr = 0.05, .momentum = 0.9},
                                    .seed = 2,
                                    .averaging = {.every = 4, .outer_lr = 0.7, .outer_momentum = 0.5}});
  EXPECT_LT(learned.last_loss, 0.1 * learned.first_loss);
}

}  // namespace
}  // namespace lockstep
