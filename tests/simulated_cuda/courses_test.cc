// SPDX-License-Identifier: Apache-2.0
// 20 steps in float64 on 1 to 4 GPUs, compared with one device, of strategies whose own tests on cores leave the order of steps to
// chance, or to which a GPU is a process: servers with workers that take turns, stages of a pipeline.
#include <gtest/gtest.h>

#include <barrier>
#include <mutex>

#include "lockstep/base/text.h"
#include "lockstep/model/partial_model.h"
#include "lockstep/strategy/devices/replica.h"
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

// Step by step on the server and on `workers` workers with `gpus` GPUs each. turns: one worker after another, each with a batch of its
// own. Returns what the server ends with.
Course course_of_servers(const StrategyOptions& options, int workers, int gpus, bool turns) {
  Course course;
  std::barrier<> turn(workers);
  run_ranks(kServers + workers, [&](World& world) {
    StrategyOptions mine = options;
    const int worker = world.rank() - kServers;
    for (int i = 0; worker >= 0 && i < gpus; ++i)
      mine.places.push_back({.device = gpu(worker * gpus + i)}), mine.devices = gpus;
    const auto strategy = make_strategy(world, small_task(), mine);
    const World share = strategy->data_world(world);
    for (int step = 0; step < kSteps; ++step) {
      if (worker < 0 || !turns) {
        train_step(*strategy, part_of(batch_of(step), *strategy, share));
        continue;
      }
      for (int other = 0; other < workers; ++other) {
        if (other == worker) train_step(*strategy, batch_of(step * workers + worker));
        turn.arrive_and_wait();
      }
    }
    strategy->synchronise();
    if (world.rank() == 0) course.parameters = values_of(strategy->model());
  });
  return course;
}

// What workers that take turns compute: each its gradient from the weights after its own last update, with a momentum of its own
// and 1/workers of the learning rate (docs/strategies/kvstore.md).
Course course_in_turns(const StrategyOptions& options, int workers) {
  const Replicas replicas = make_replicas(1 + workers, small_task(), options);
  const auto parameters = replicas[0].model->parameters();
  UpdateOptions rule = update_options(options);
  std::get<SGDOptions>(rule.optimizer).lr /= workers;
  std::vector<std::shared_ptr<Optimizer>> optimizers;
  for (int worker = 0; worker < workers; ++worker) optimizers.push_back(make_optimizer(parameters, rule));
  for (int update = 0; update < kSteps * workers; ++update) {
    const Replica& worker = replicas[to_size(1 + update % workers)];
    const Batch batch = batch_of(update);
    worker.model->zero_grad();
    small_task().loss(worker.forward(small_task(), batch.data), batch.target).backward();
    const auto computed = worker.model->parameters();
    for (std::size_t i = 0; i < parameters.size(); ++i)
      torch::Tensor(parameters[i]).mutable_grad() = computed[i].grad();
    optimizers[to_size(update % workers)]->step();
    copy_model(*replicas[0].model, *worker.model);
  }
  return {values_of(*replicas[0].model), {}};
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
  expect_same_course(course_of_servers(options_, 1, count_, false), {one.parameters, {}});
}

TEST_P(ServersOnGpus, of_workers_that_take_turns_train_as_one_device_does) {
  if (options_.kvstore.kind == KVStoreKind::kDistSync) {  // no turns: every worker has its part of each batch
    const Course one = on_one_device(small_task(), options_);
    return expect_same_course(course_of_servers(options_, count_, 1, false), {one.parameters, {}});
  }
  expect_same_course(course_of_servers(options_, count_, 1, true), course_in_turns(options_, count_));
}

// ---- Stages

class StagesOnGpus : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Ranks, StagesOnGpus, ::testing::Values(2, 3, 4));

TEST_P(StagesOnGpus, train_as_one_device_does_with_every_schedule) {
  StrategyOptions options{
      .kind = StrategyKind::kPipeline, .optimizer = SGDOptions{.lr = 0.1, .momentum = 0.9}, .seed = 4};
  const Course one = on_one_device(small_task(), options);
  for (const char* schedule : {"naive", "gpipe", "1f1b"}) {
    options.pipeline.schedule = value_named<PipelineSchedule>(schedule, "--pipeline-schedule");
    run_ranks_on_gpus(GetParam(), [&](World& world) {
      const auto strategy = make_strategy(world, small_task(), options);
      Course own, expected;
      for (int step = 0; step < kSteps; ++step) {
        const Batch batch = part_of(batch_of(step), strategy->data_world(world));
        own.losses.push_back(train_step(*strategy, {batch.data.to(world.device()), batch.target.to(world.device())}));
      }
      const auto parameters = strategy->model().parameters();
      for (std::size_t i = 0; i < parameters.size(); ++i)
        if (is_held(parameters[i])) {
          own.parameters.push_back(parameters[i].detach().cpu());
          expected.parameters.push_back(one.parameters[i]);
        }
      EXPECT_FALSE(own.parameters.empty());
      expected.losses = one.losses;
      expect_same_course(own, expected);
    });
  }
}

}  // namespace
}  // namespace lockstep
