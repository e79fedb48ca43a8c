// SPDX-License-Identifier: Apache-2.0
#include "lockstep/strategy.h"

#include <map>
#include <mutex>

#include "lockstep/models.h"
#include "lockstep/strategy/option_names.h"
#include "lockstep/strategy/pipeline/tensor_messages.h"
#include "tests/strategies.h"
#include "tests/worlds.h"

namespace lockstep {
namespace {

using namespace testing;

StrategyOptions pipeline(const std::string& schedule = "1f1b", const std::string& stages = "") {
  return {.kind = StrategyKind::kPipeline,
          .optimizer = SGDOptions{.lr = 0.1, .momentum = 0.9},
          .seed = 4,
          .pipeline = {.stages = stages, .schedule = value_named<PipelineSchedule>(schedule, "--pipeline-schedule")}};
}

using MakeBatch = std::function<Batch(int step)>;

// The result of rank 0, after a check that every rank has the same parameters.
Course course_of_ranks(Fabric fabric, int ranks, const Task& task, const StrategyOptions& options,
                       const MakeBatch& make_batch) {
  Course course;
  std::mutex mutex;
  run_over(fabric, ranks, [&](World& world) {
    const auto strategy = make_strategy(world, task, options);
    const World data_world = strategy->data_world(world);
    Course mine;
    for (int step = 0; step < kSteps; ++step) {
      const Batch part = lockstep::testing::part_of(make_batch(step), data_world);
      mine.losses.push_back(strategy->forward_backward(part).mean_loss);
      strategy->update();
    }
    strategy->synchronise();
    mine.parameters = lockstep::testing::values_of(strategy->model());
    for (const torch::Tensor& value : mine.parameters) {
      const torch::Tensor all = world.all_gather(value);
      for (int rank = 1; rank < world.size(); ++rank) EXPECT_TRUE(torch::equal(all[rank], all[0]));
    }
    static_cast<void>(strategy->report());
    const std::lock_guard lock(mutex);
    if (world.rank() == 0) course = mine;
  });
  return course;
}

Batch ten(int step) { return batch_of(step); }

class PipelineRanksOfSize : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Sizes, PipelineRanksOfSize, ::testing::Values(2, 3, 4));

TEST_P(PipelineRanksOfSize, train_as_one_device_does) {
  const Course one = on_one_device(small_task(), pipeline());
  for (const char* schedule : {"naive", "gpipe", "1f1b"})
    expect_same_course(course_of_ranks(Fabric::kSharedMemory, GetParam(), small_task(), pipeline(schedule), ten), one);
}

TEST(PipelineRanks, train_over_gloo) {
  expect_same_course(course_of_ranks(Fabric::kLonelyHosts, 3, small_task(), pipeline("1f1b", "0-1,2-4,5-6"), ten),
                     on_one_device(small_task(), pipeline()));
}

TEST(PipelineRanks, train_with_replicas_of_each_stage) {
  expect_same_course(course_of_ranks(Fabric::kSharedMemory, 4, small_task(), pipeline("1f1b", "2"), ten),
                     on_one_device(small_task(), pipeline()));
}

TEST(PipelineRanks, train_when_a_replica_has_no_samples) {
  const auto one_sample = [](int step) { return batch_of(step, 1); };
  expect_same_course(course_of_ranks(Fabric::kSharedMemory, 4, small_task(), pipeline("1f1b", "2"), one_sample),
                     on_one_device(small_task(), pipeline(), kSteps, 1));
}

TEST(PipelineRanks, train_a_gpt_with_a_shared_embedding) {
  Task task = gpt_task("gpt", {.vocabulary = 11, .context = 5, .layers = 2, .heads = 2, .width = 8, .dropout = 0});
  task.make_model = [make = task.make_model] {
    auto model = make();
    model->to(torch::kFloat64);
    return model;
  };
  const torch::Tensor tokens = torch::randint(0, 11, {6, 5}, torch::kInt64);
  const auto same_batch = [&](int) { return Batch{tokens, tokens.roll(-1, 1)}; };
  StrategyOptions single = pipeline();
  single.kind = StrategyKind::kSingle;
  const Course one = course_of_ranks(Fabric::kSharedMemory, 1, task, single, same_batch);
  expect_same_course(course_of_ranks(Fabric::kSharedMemory, 3, task, pipeline(), same_batch), one);
  expect_same_course(course_of_ranks(Fabric::kSharedMemory, 4, task, pipeline("gpipe", "2"), same_batch), one);
}

TEST(PipelineRanks, send_the_optimizers_state_to_rank_0) {
  const auto one = make_strategy(World::single(), small_task(), [] {
    StrategyOptions options = pipeline();
    options.kind = StrategyKind::kSingle;
    return options;
  }());
  course_of(*one);
  run_ranks(3, [&](World& world) {
    const auto strategy = make_strategy(world, small_task(), pipeline());
    course_of(*strategy);
    if (world.rank() != 0) return;
    const auto parameters = strategy->model().parameters(), expected = one->model().parameters();
    for (std::size_t i = 0; i < parameters.size(); ++i)
      EXPECT_TRUE(torch::allclose(strategy->optimizer().state_of(parameters[i]).at("momentum_buffer"),
                                  one->optimizer().state_of(expected[i]).at("momentum_buffer"), 1e-9, 1e-12));
  });
}

TEST(PipelineRanks, end_with_the_exception_of_one) {
  Task task = small_task();
  task.stages = [](torch::nn::Module& model) {
    auto stages = pieces_of(dynamic_cast<torch::nn::SequentialImpl&>(model));
    stages[5].forward = [](const Tensors&) -> Tensors { throw DataError({.what = "thrown in piece 5"}); };
    return stages;
  };
  const auto train = [&](World& world) {
    make_strategy(world, task, pipeline("1f1b", "0-1,2-6"))->forward_backward(batch_of(0));
  };
  EXPECT_TRUE(contains(message_of<DataError>([&] { run_ranks(2, train); }), "thrown in piece 5"));
}

TEST(PipelineRanks, refuse_what_they_can_not_do) {
  const auto refusal = [](const StrategyOptions& options) {
    return message_of<UsageError>(
        [&] { run_ranks(2, [&](World& world) { make_strategy(world, small_task(), options); }); });
  };
  StrategyOptions options = pipeline();
  options.devices = 2;
  EXPECT_TRUE(contains(refusal(options), "a pipeline of ranks with 2 devices each"));
  options = pipeline();
  options.clipping.max_norm = 1;
  EXPECT_TRUE(contains(refusal(options), "clipping by norm"));
  EXPECT_TRUE(contains(refusal(pipeline("1f1b", "3")), "3 stages on 2 devices"));
}

TEST(TensorMessages, carry_shapes_dtypes_and_undefined_tensors) {
  const Tensors sent = {torch::arange(6).reshape({2, 3}),
                        torch::Tensor(),
                        torch::rand({2, 3, 4, 5}).contiguous(torch::MemoryFormat::ChannelsLast),
                        torch::zeros({0, 3}),
                        torch::full({}, 2.5, torch::kFloat64).requires_grad_(),
                        torch::tensor({true, false})};
  run_ranks(2, [&](World& world) {
    if (world.rank() == 0) {
      TensorSender sender(world, 1, 5);
      sender.send(sent);
      sender.send({});
      sender.finish();
      return;
    }
    const Tensors received = receive_tensors(world, 0, 5);
    ASSERT_EQ(received.size(), sent.size());
    for (std::size_t i = 0; i < sent.size(); ++i) {
      ASSERT_EQ(received[i].defined(), sent[i].defined());
      if (!sent[i].defined()) continue;
      EXPECT_EQ(received[i].scalar_type(), sent[i].scalar_type());
      EXPECT_EQ(received[i].strides(), sent[i].strides());
      EXPECT_EQ(received[i].requires_grad(), sent[i].requires_grad());
      EXPECT_TRUE(torch::equal(received[i], sent[i]));
    }
    EXPECT_TRUE(receive_tensors(world, 0, 5).empty());
  });
}

TEST(TensorMessages, refuse_too_many_tensors) {
  run_ranks(2, [](World& world) {
    if (world.rank() != 0) return;
    TensorSender sender(world, 1, 0);
    EXPECT_TRUE(contains(message_of<UsageError>([&] {
                           sender.send(Tensors(30, torch::zeros({1, 1})));
                         }),
                         "30 tensors"));
  });
}

}  // namespace
}  // namespace lockstep
