// SPDX-License-Identifier: Apache-2.0
#include "lockstep/strategy.h"

#include <torch/nn/modules/conv.h>

#include <map>
#include <mutex>

#include "lockstep/base/int_vector.h"
#include "lockstep/sampler.h"
#include "lockstep/strategy/averaging/flat_block.h"
#include "lockstep/strategy/devices/replica.h"
#include "tests/strategies.h"
#include "tests/support.h"

namespace lockstep {
namespace {

using namespace testing;

StrategyOptions averaging(int devices, int64_t every = 1) {
  return {.kind = StrategyKind::kAveraging,
          .optimizer = SGDOptions{.lr = 0.1},
          .seed = 4,
          .devices = devices,
          .averaging = {.every = every}};
}

class AveragingOfSize : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Sizes, AveragingOfSize, ::testing::Values(1, 2, 3, 4));

TEST_P(AveragingOfSize, trains_as_one_device_does_when_it_averages_every_batch) {
  expect_same_course(course_of(small_task(), averaging(GetParam())),
                     on_one_device(small_task(), averaging(GetParam())));
}

// By hand: replicas that train alone for h batches, then their mean.
std::vector<torch::Tensor> local_sgd_by_hand(int replicas, int every, int steps) {
  const StrategyOptions options = averaging(1);
  IntVector<std::unique_ptr<Strategy>> all;
  for (int i = 0; i < replicas; ++i) {
    StrategyOptions single = options;
    single.kind = StrategyKind::kSingle;
    all.push_back(strategy_of(small_task(), single));
  }
  const torch::NoGradGuard no_grad;
  for (int step = 0; step < steps; ++step) {
    for (int i = 0; i < replicas; ++i) {
      const torch::AutoGradMode grad(true);
      all[i]->forward_backward(lockstep::part_of(batch_of(step), i, replicas));
      all[i]->update();
    }
    if ((step + 1) % every != 0) continue;
    for (size_t p = 0; p < values_of(all[0]->model()).size(); ++p) {
      torch::Tensor mean = torch::zeros_like(all[0]->model().parameters()[p]);
      for (int i = 0; i < replicas; ++i)
        mean += all[i]->model().parameters()[p] * (static_cast<double>(even_part(kBatch, i, replicas).size()) / kBatch);
      for (const auto& strategy : all) strategy->model().parameters()[p].copy_(mean);
    }
    for (const auto& strategy : all) strategy->restored(step + 1);
  }
  return values_of(all[0]->model());
}

TEST(Averaging, is_local_sgd_when_it_averages_every_5_batches) {
  const Course course = course_of(small_task(), averaging(3, 5));
  expect_same_course({course.parameters, {}}, {local_sgd_by_hand(3, 5, kSteps), {}});
}

TEST(Averaging, averages_h_times_less_often) {
  const auto averages = [](int64_t every) {
    const auto strategy = strategy_of(small_task(), averaging(2, every));
    course_of(*strategy);
    const Report report = strategy->report();
    return std::map<std::string, double>(report.begin(), report.end())["averages"];
  };
  EXPECT_EQ(averages(1), 20);
  EXPECT_EQ(averages(5), 4);
  EXPECT_EQ(averages(6), 4);  // three times, and once more in synchronise()
}

// 2 ranks of 2 devices: the same averages as 4 devices of one rank.
TEST(Averaging, averages_over_ranks_too) {
  const Course one = course_of(small_task(), averaging(4, 2));
  std::mutex mutex;
  StrategyOptions options = averaging(2, 2);
  options.places = test_places(options.devices);
  run_ranks(2, [&](World& world) {
    const auto strategy = make_strategy(world, small_task(), options);
    Course course;
    for (int step = 0; step < kSteps; ++step) {
      // Parts of 2, 3, 2 and 3 samples, as one process with 4 devices makes them.
      course.losses.push_back(strategy->forward_backward(part_of(batch_of(step), world)).mean_loss);
      strategy->update();
    }
    strategy->synchronise();
    course.parameters = values_of(strategy->model());
    const std::lock_guard lock(mutex);
    expect_same_course(course, one);
    const Report report = strategy->report();
    std::map<std::string, double> numbers(report.begin(), report.end());
    EXPECT_EQ(numbers["exchanged_bytes"], 10 * numbers["block_bytes"]);
  });
}

// Each replica has its own momentum until synchronise() makes the replicas one model, as a checkpoint needs it.
TEST(Averaging, synchronises_parameters_and_optimizer_state_of_all_ranks) {
  StrategyOptions options = averaging(2, 3);
  std::get<SGDOptions>(options.optimizer).momentum = 0.9;
  run_ranks(3, [&](World& world) {
    const auto strategy = make_strategy(world, small_task(), options);
    for (int step = 0; step < 4; ++step) {
      strategy->forward_backward(part_of(batch_of(step), world));
      strategy->update();
    }
    strategy->synchronise();
    for (const torch::Tensor& parameter : strategy->model().parameters()) {
      const torch::Tensor momentum = strategy->optimizer().state_of(parameter).at("momentum_buffer");
      EXPECT_GT(momentum.norm().item<double>(), 0);
      const torch::Tensor all = world.all_gather(momentum);
      const torch::Tensor values = world.all_gather(parameter.detach());
      for (int rank = 1; rank < world.size(); ++rank) {
        EXPECT_TRUE(torch::equal(all[rank], all[0]));
        EXPECT_TRUE(torch::equal(values[rank], values[0]));
      }
    }
  });
}

TEST(Averaging, refuses_parameters_of_16_bits) {
  Task task = small_task();
  task.make_model = [] {
    torch::nn::Sequential net(torch::nn::Linear(6, 4));
    net->to(torch::kBFloat16);
    return net.ptr();
  };
  EXPECT_TRUE(contains(message_of<UsageError>([&] { strategy_of(task, averaging(2)); }),
                       "parameters of BFloat16 can't be averaged"));
}

TEST(Averaging, takes_the_outer_step_of_diloco) {
  StrategyOptions options = averaging(1, 10);
  options.averaging.outer_lr = 0.7;
  options.averaging.outer_momentum = 0.9;
  const Course course = course_of(small_task(), options);
  // By hand: two rounds of ten steps of one replica.
  StrategyOptions single = options;
  single.kind = StrategyKind::kSingle;
  const auto inner = strategy_of(small_task(), single);
  auto anchor = values_of(inner->model());
  std::vector<torch::Tensor> velocity;
  for (const auto& value : anchor) velocity.push_back(torch::zeros_like(value));
  for (int step = 0; step < kSteps; ++step) {
    inner->forward_backward(batch_of(step));
    inner->update();
    if ((step + 1) % 10 != 0) continue;
    const torch::NoGradGuard no_grad;
    for (size_t p = 0; p < anchor.size(); ++p) {
      const torch::Tensor gradient = anchor[p] - inner->model().parameters()[p];
      velocity[p] = 0.9 * velocity[p] + gradient;
      anchor[p] = anchor[p] - 0.7 * (gradient + 0.9 * velocity[p]);
      inner->model().parameters()[p].copy_(anchor[p]);
    }
    inner->restored(step + 1);
  }
  expect_same_course({course.parameters, {}}, {anchor, {}});
}

TEST(Averaging, ends_all_threads_with_the_exception_of_one) {
  Task task = small_task();
  task.forward = [](torch::nn::Module& model, const torch::Tensor& data) {
    if (data.size(0) == 4) throw DataError({.what = "thrown on the device with 4 samples"});
    return dynamic_cast<torch::nn::SequentialImpl&>(model).forward(data);
  };
  const auto strategy = strategy_of(task, averaging(3));
  EXPECT_TRUE(contains(message_of<DataError>([&] { strategy->forward_backward(batch_of(0)); }), "with 4 samples"));
}

TEST(Averaging, refuses_options_out_of_range) {
  const auto refusal = [](const StrategyOptions& options) {
    return message_of<UsageError>([&] { strategy_of(small_task(), options); });
  };
  EXPECT_TRUE(contains(refusal(averaging(2, 0)), "--average-every 0"));
  StrategyOptions options = averaging(2);
  options.averaging.outer_lr = 0;
  EXPECT_TRUE(contains(refusal(options), "--outer-lr 0"));
}

TEST(FlatBlock, holds_every_weight_and_keeps_values_shapes_and_strides) {
  torch::nn::Conv2d conv(3, 4, 3);
  set_layout(*conv, Layout::kChannelsLast);
  const auto before = values_of(*conv);
  const torch::Tensor block = make_flat_block(*conv, World::single());
  const auto after = conv->parameters();
  for (size_t i = 0; i < before.size(); ++i) {
    EXPECT_TRUE(torch::equal(after[i], before[i]));
    EXPECT_EQ(after[i].strides(), before[i].strides());
    EXPECT_TRUE(after[i].is_alias_of(block));
  }
  block.zero_();
  EXPECT_TRUE(after[0].eq(0).all().item<bool>());
}

TEST(FlatBlock, names_a_parameter_of_another_dtype) {
  torch::nn::Sequential net(torch::nn::Linear(2, 2), torch::nn::Linear(2, 2));
  net[1]->to(torch::kFloat64);
  const auto flatten = [&] { make_flat_block(*net, World::single()); };
  EXPECT_TRUE(contains(message_of<UsageError>(flatten), "1.weight is Double"));
}

}  // namespace
}  // namespace lockstep
