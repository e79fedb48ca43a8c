// SPDX-License-Identifier: Apache-2.0
// 20 steps in float64 on 1 to 4 GPUs, compared with one device, of strategies to which a GPU is a process, or may be: servers and
// their workers, stages of a pipeline.
#include <gtest/gtest.h>

#include <atomic>
#include <limits>

#include "lockstep/base/text.h"
#include "lockstep/model/partial_model.h"
#include "lockstep/models.h"
#include "lockstep/strategy/option_names.h"
#include "tests/simulated_cuda/gpu_strategies.h"

namespace lockstep {
namespace {

using namespace testing;

// ---- Servers

constexpr int kServers = 1;

StrategyOptions with_servers(const std::string& kind) {
  return {.kind = StrategyKind::kKVStore,
          .optimizer = SGDOptions{.lr = 0.1, .momentum = 0.9, .nesterov = true},
          .seed = 4,
          .timeout = std::chrono::seconds(60),
          .kvstore = {.kind = value_named<KVStoreKind>(kind, "--kvstore"), .servers = kServers, .split_above = 40}};
}

// On the server and on `workers` workers with `gpus` GPUs each. Returns what the server ends with.
Course course_of_servers(const StrategyOptions& options, int workers, int gpus) {
  Course course;
  run_ranks(kServers + workers, [&](World& world) {
    StrategyOptions mine = options;
    const int worker = world.rank() - kServers;
    for (int i = 0; worker >= 0 && i < gpus; ++i)
      mine.places.push_back({.device = gpu(worker * gpus + i)}), mine.devices = gpus;
    const auto strategy = make_strategy(world, small_task(), mine);
    const World share = strategy->ranks(world).data;
    for (int step = 0; step < kSteps; ++step) train_step(*strategy, part_of(batch_of(step), *strategy, share));
    strategy->synchronise();
    if (world.rank() == 0) course.parameters = values_of(strategy->model());
  });
  return course;
}

class ServersOnGpus : public ::testing::TestWithParam<std::tuple<std::string, int>> {
 protected:
  StrategyOptions options_ = with_servers(std::get<0>(GetParam()));
  int count_ = std::get<1>(GetParam());
};
INSTANTIATE_TEST_SUITE_P(Gpus, ServersOnGpus,
                         ::testing::Combine(::testing::Values("dist_sync", "dist_async", "dist_bounded"),
                                            ::testing::Values(1, 2, 3, 4)),
                         [](const auto& test) {
                           return concat(std::get<0>(test.param), "_", std::get<1>(test.param));
                         });

TEST_P(ServersOnGpus, of_one_worker_train_as_one_device_does) {
  const Course one = on_one_device(small_task(), options_);
  expect_same_course(course_of_servers(options_, 1, count_), {one.parameters, {}});
}

// Several asynchronous workers compute something else than one device (docs/strategies/kvstore.md).
class WorkersOnGpus : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Gpus, WorkersOnGpus, ::testing::Values(1, 2, 3, 4));

TEST_P(WorkersOnGpus, in_step_train_as_one_device_does) {
  const StrategyOptions options = with_servers("dist_sync");
  const Course one = on_one_device(small_task(), options);
  expect_same_course(course_of_servers(options, GetParam(), 1), {one.parameters, {}});
}

// ---- A GPU in each process

TEST(OneGpu, trains_as_one_device_does) {
  const StrategyOptions options{
      .kind = StrategyKind::kSingle, .optimizer = SGDOptions{.lr = 0.1, .momentum = 0.9}, .seed = 4};
  const auto strategy = make_strategy(World::single({.device = torch::kCUDA}), small_task(), options);
  Course course;
  for (int step = 0; step < kSteps; ++step)
    course.losses.push_back(train_step(*strategy, {batch_of(step).data.to(gpu(0)), batch_of(step).target.to(gpu(0))}));
  course.parameters = values_of(strategy->model());
  expect_same_course(course, on_one_device(small_task(), options));
}

class AveragingOnGpus : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Processes, AveragingOnGpus, ::testing::Values(2, 3, 4));

TEST_P(AveragingOnGpus, of_processes_trains_as_one_device_does) {
  const StrategyOptions options{.kind = StrategyKind::kAveraging, .optimizer = SGDOptions{.lr = 0.1}, .seed = 4};
  const Course one = on_one_device(small_task(), options);
  run_ranks(GetParam(), [&](World& world) {
    StrategyOptions mine = options;
    mine.places = {{.device = gpu(world.rank())}}, mine.devices = 1;
    const auto strategy = make_strategy(world, small_task(), mine);
    Course course;
    for (int step = 0; step < kSteps; ++step)
      course.losses.push_back(train_step(*strategy, part_of(batch_of(step), strategy->ranks(world).data)));
    strategy->synchronise();
    course.parameters = values_of(strategy->model());
    expect_same_course(course, one);
  });
}

// ---- Stages that are threads of one process

class StagesOfOneProcess : public ::testing::TestWithParam<int> {
 protected:
  static StrategyOptions pipeline(const std::string& stages = "") {
    return {.kind = StrategyKind::kPipeline,
            .optimizer = SGDOptions{.lr = 0.1, .momentum = 0.9},
            .seed = 4,
            .pipeline = {.stages = stages}};
  }
};
INSTANTIATE_TEST_SUITE_P(Gpus, StagesOfOneProcess, ::testing::Values(1, 2, 3, 4));

TEST_P(StagesOfOneProcess, clip_by_the_norm_of_all_of_them) {
  StrategyOptions options = pipeline();
  options.optimizer = AdamWOptions{.lr = 0.01, .weight_decay = 0.1};
  options.clipping = {.max_norm = 0.3, .max_value = 0.1};
  options.ema_decay = 0.9;
  const auto strategy = strategy_on_gpus(options, GetParam(), small_task());
  options.kind = StrategyKind::kSingle;
  const auto one = make_strategy(World::single(), small_task(), options);
  expect_same_course(course_of(*strategy), course_of(*one));
  EXPECT_NEAR(strategy->optimizer().gradient_norm(), one->optimizer().gradient_norm(), 1e-9);
  const auto parameters = strategy->model().parameters(), expected = one->model().parameters();
  for (size_t i = 0; i < parameters.size(); ++i)
    for (const auto& [name, state] : one->optimizer().state_of(expected[i]))
      EXPECT_TRUE(torch::allclose(strategy->optimizer().state_of(parameters[i]).at(name).cpu(), state, 1e-9, 1e-12))
          << name << " of " << i;
}

// If a gradient on any GPU is not finite, none of them updates.
TEST_P(StagesOfOneProcess, skip_a_step_together) {
  const auto strategy = strategy_on_gpus(pipeline(concat(GetParam())), GetParam(), small_task());
  train_step(*strategy, batch_of(0));
  strategy->optimizer().set_loss_scale(4);
  train_step(*strategy, batch_of(1));
  EXPECT_FALSE(strategy->optimizer().skipped());
  const auto before = values_of(strategy->model());
  Batch bad = batch_of(2);
  bad.data[0][0] = std::numeric_limits<double>::infinity();
  train_step(*strategy, bad);
  EXPECT_TRUE(strategy->optimizer().skipped());
  const auto after = values_of(strategy->model());
  for (size_t i = 0; i < before.size(); ++i) EXPECT_TRUE(torch::equal(before[i], after[i])) << i;
}

// As a checkpoint does. The first step of the second strategy moves pieces and state to where it has measured that they are best.
TEST_P(StagesOfOneProcess, go_on_with_the_state_of_others) {
  const auto first = strategy_on_gpus(pipeline("1"), 1, small_task()),
             second = strategy_on_gpus(pipeline(), GetParam(), small_task());
  course_of(*first, 5);
  const auto from = first->model().parameters(), into = second->model().parameters();
  for (size_t i = 0; i < from.size(); ++i) {
    const torch::NoGradGuard no_grad;
    torch::Tensor(into[i]).copy_(from[i]);
    second->optimizer().set_state(into[i], first->optimizer().state_of(from[i]));
  }
  second->restored(5);
  expect_same_course(course_of(*second, 5), course_of(*first, 5));
}

TEST_P(StagesOfOneProcess, validate_the_model_that_they_train) {
  const auto task = in_float64(
      classification_task<ResNet>("resnet18", ResNetOptions{.layers = 18, .classes = 10, .small_images = true}));
  StrategyOptions options = pipeline();
  options.pipeline.micro_batches = 1;
  std::get<SGDOptions>(options.optimizer).lr = 0.01;
  const Batch batch{torch::linspace(-1, 1, 3 * 3 * 8 * 8, torch::kFloat64).reshape({3, 3, 8, 8}),
                    torch::tensor({1, 2, 3})};
  const auto strategy = strategy_on_gpus(options, GetParam(), task);
  const auto one = make_strategy(World::single(), task, on_one(options));
  train_step(*strategy, batch), train_step(*one, batch);
  strategy->synchronise();
  const torch::NoGradGuard no_grad;
  strategy->model().eval(), one->model().eval();
  EXPECT_TRUE(torch::allclose(strategy->forward(batch).cpu(), one->forward(batch), 1e-9, 1e-9));
}

// ---- Stages that are processes

class StagesOnGpus : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Ranks, StagesOnGpus, ::testing::Values(2, 3, 4));

TEST_P(StagesOnGpus, train_as_one_device_does_with_every_schedule) {
  StrategyOptions options{
      .kind = StrategyKind::kPipeline, .optimizer = SGDOptions{.lr = 0.1, .momentum = 0.9}, .seed = 4};
  const Course one = on_one_device(small_task(), options);
  for (const char* schedule : {"naive", "gpipe", "1f1b"}) {
    options.pipeline.schedule = value_named<PipelineSchedule>(schedule, "--pipeline-schedule");
    std::atomic<size_t> held = 0;  // a stage may have no parameters
    run_ranks_on_gpus(GetParam(), [&](World& world) {
      const auto strategy = make_strategy(world, small_task(), options);
      Course own, expected;
      for (int step = 0; step < kSteps; ++step) {
        const Batch batch = part_of(batch_of(step), strategy->ranks(world).data);
        own.losses.push_back(train_step(*strategy, {batch.data.to(world.device()), batch.target.to(world.device())}));
      }
      const auto parameters = strategy->model().parameters();
      for (size_t i = 0; i < parameters.size(); ++i)
        if (is_held(parameters[i])) {
          own.parameters.push_back(parameters[i].detach().cpu());
          expected.parameters.push_back(one.parameters[i]);
        }
      held += own.parameters.size();
      expected.losses = one.losses;
      expect_same_course(own, expected);
    });
    EXPECT_EQ(held, one.parameters.size());
  }
}

}  // namespace
}  // namespace lockstep
