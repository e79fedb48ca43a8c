// SPDX-License-Identifier: Apache-2.0
#include <torch/nn/modules/normalization.h>

#include <map>
#include <set>

#include "tests/lossless.h"
#include "tests/support.h"

namespace lockstep {
namespace {

using testing::Courses;

class LosslessOptions : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Ranks, LosslessOptions, ::testing::Values(2, 3, 4, 7));

TEST_P(LosslessOptions, train_as_one_rank_does) {
  World alone = World::single();
  Courses many;
  run_ranks(GetParam(), [&](World& world) {
    Courses mine = testing::lossless_courses(world);
    if (world.rank() == 0) many = std::move(mine);
  });
  testing::expect_same_courses(many, testing::lossless_courses(alone));
}

TEST(Accumulated, parts_train_as_whole_batches_do_on_any_number_of_ranks) {
  for (const bool share : {true, false})
    for (const int ranks : {1, 2}) {
      const auto courses = [&](int parts) {
        Courses found;
        run_ranks(ranks, [&](World& world) {
          StrategyOptions options{.optimizer = AdamWOptions{}, .accumulate = parts, .ddp = {.share_parameters = share}};
          auto mine = testing::strategy_course(world, options);
          if (world.rank() == 0) found["ddp"] = std::move(mine);
        });
        return found;
      };
      const Courses whole = courses(1);
      testing::expect_same_courses(courses(2), whole);
      testing::expect_same_courses(courses(7), whole);  // more parts than samples of two ranks
    }
}

TEST(Accumulated, parts_train_as_whole_batches_do_in_other_strategies) {
  for (const auto kind :
       {StrategyKind::kSingle, StrategyKind::kTowers, StrategyKind::kKVStore, StrategyKind::kAveraging}) {
    SCOPED_TRACE(strategy_info(kind).name);
    StrategyOptions options{.kind = kind, .optimizer = SGDOptions{.lr = 0.1}};
    options.devices = strategy_info(kind).threads ? 2 : 1;
    const auto whole = testing::course_of(testing::small_task(), options);
    for (const int parts : {3, 7}) {
      options.accumulate = parts;
      testing::expect_same_course(testing::course_of(testing::small_task(), options), whole);
    }
  }
}

// A norm whose type does not say so.
struct ScaleImpl : torch::nn::Module {
  torch::Tensor gain = register_parameter("gain", torch::ones({4}));
  torch::Tensor forward(const torch::Tensor& x) { return x / x.square().mean(-1, true).sqrt() * gain; }
};
TORCH_MODULE(Scale);

// After a step with gradients of zero.
TEST(NoDecay, leaves_norms_and_biases_as_they_are) {
  Task task = testing::small_task();
  task.make_model = [] {
    torch::nn::Sequential net(torch::nn::Linear(6, 8), torch::nn::LayerNorm(torch::nn::LayerNormOptions({8})),
                              torch::nn::Linear(8, 4), Scale());
    net->to(torch::kFloat64);
    return net.ptr();
  };
  task.loss = [](const torch::Tensor& output, const torch::Tensor&) { return 0 * output.sum(); };
  const std::map<std::string, std::set<std::string>> cases = {
      {"", {}},
      {"norm", {"1.weight", "1.bias", "3.gain"}},
      {"bias", {"0.bias", "1.bias", "2.bias"}},
      {"norm,bias", {"0.bias", "1.weight", "1.bias", "2.bias", "3.gain"}}};
  for (const auto kind : {StrategyKind::kDdp, StrategyKind::kTowers, StrategyKind::kAveraging})
    for (const auto& [no_decay, spared] : cases)
      run_ranks(kind == StrategyKind::kDdp ? 2 : 1, [&](World& world) {
        StrategyOptions options{
            .kind = kind, .optimizer = SGDOptions{.lr = 0.1, .weight_decay = 0.5}, .no_decay = no_decay};
        options.devices = strategy_info(kind).threads ? 2 : 1;
        const auto strategy = make_strategy(world, task, options);
        const auto before = testing::values_of(strategy->model());
        strategy->forward_backward(testing::part_of(testing::batch_of(0), world));
        strategy->update();
        strategy->synchronise();
        auto value = before.begin();
        for (const auto& parameter : strategy->model().named_parameters())
          EXPECT_TRUE(torch::allclose(parameter.value(), *value++ * (spared.contains(parameter.key()) ? 1 : 0.95)))
              << parameter.key() << " with " << no_decay;
        world.barrier();
      });
}

TEST(NoDecay, is_refused_where_it_is_not_known) {
  const auto refusal = [](const StrategyOptions& options) {
    return testing::message_of<UsageError>([&] { testing::strategy_of(testing::small_task(), options); });
  };
  for (const auto kind : {StrategyKind::kDataParallel, StrategyKind::kPipeline, StrategyKind::kKVStore})
    EXPECT_TRUE(testing::contains(refusal({.kind = kind, .no_decay = "bias"}), "--no-decay with strategy"));
  EXPECT_TRUE(testing::contains(refusal({.no_decay = "bn"}), "--no-decay bn"));
}

TEST(Accumulated, parts_are_refused_where_the_batch_is_computed_otherwise) {
  const auto refusal = [](const StrategyOptions& options) {
    return testing::message_of<UsageError>([&] { testing::strategy_of(testing::small_task(), options); });
  };
  for (const auto kind : {StrategyKind::kDataParallel, StrategyKind::kPipeline})
    EXPECT_TRUE(testing::contains(refusal({.kind = kind, .accumulate = 2}),
                                  "single, ddp, towers, kvstore and averaging have it"));
  EXPECT_TRUE(testing::contains(refusal({.accumulate = 2, .ddp = {.virtual_shards = 2}}), "--virtual-shards"));
  EXPECT_TRUE(testing::contains(refusal({.accumulate = 0}), "--accumulate 0"));
}

}  // namespace
}  // namespace lockstep
