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
  const auto generator = at::make_generator<at::CPUGeneratorImpl>(std::uint64_t{9});
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

TEST(Convergence, bfloat16_converges_as_float32_does) {
  StrategyOptions options = kDdp;
  const Learned exact = learn(2, options);
  options.precision = Precision::kBFloat16;
  const Learned rounded = learn(2, options);
  EXPECT_LT(exact.last_loss, 0.01 * exact.first_loss);
  EXPECT_LT(rounded.last_loss, 0.01 * rounded.first_loss);
  EXPECT_NEAR(rounded.first_loss, exact.first_loss, 0.01);
  EXPECT_EQ(rounded.weight.scalar_type(), torch::kFloat32);
  EXPECT_FALSE(torch::allclose(rounded.weight, exact.weight, 1e-4, 1e-4)) << "nothing was rounded";
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
