// SPDX-License-Identifier: Apache-2.0
#include "lockstep/strategy.h"

#include <map>
#include <mutex>

#include "lockstep/model/partial_model.h"
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

// The parameters of all ranks, on each; those that several ranks hold must be the same.
std::vector<torch::Tensor> gathered(const World& world, const torch::nn::Module& model) {
  std::vector<torch::Tensor> values;
  for (const torch::Tensor& parameter : model.parameters()) {
    const auto holds = world.exchange_texts(is_held(parameter) ? "held" : "");
    const auto owner = std::find(holds.begin(), holds.end(), "held") - holds.begin();
    EXPECT_LT(owner, world.size()) << "a parameter that no rank holds";
    values.push_back(is_held(parameter) ? parameter.detach().clone()
                                        : torch::empty(parameter.sizes(), parameter.dtype()));
    world.broadcast(values.back(), static_cast<int>(owner));
    EXPECT_TRUE(!is_held(parameter) || torch::equal(values.back(), parameter));
  }
  return values;
}

// The result of rank 0.
Course course_of_ranks(Fabric fabric, int ranks, const Task& task, const StrategyOptions& options,
                       const MakeBatch& make_batch) {
  Course course;
  std::mutex mutex;
  run_over(fabric, ranks, [&](World& world) {
    const auto strategy = make_strategy(world, task, options);
    const World data_world = strategy->ranks(world).data;
    Course mine;
    for (int step = 0; step < kSteps; ++step) {
      const Batch part = lockstep::testing::part_of(make_batch(step), data_world);
      mine.losses.push_back(strategy->forward_backward(part).mean_loss);
      strategy->update();
    }
    strategy->synchronise();
    mine.parameters = gathered(world, strategy->model());
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

TEST(PipelineRanks, cut_branches_that_meet_again) {
  const Course one = on_one_device(siamese_task(), pipeline());
  for (const char* stages : {"0-1,2-3,4-5", "0-2,3-4,5-5"})
    expect_same_course(course_of_ranks(Fabric::kSharedMemory, 3, siamese_task(), pipeline("1f1b", stages), ten), one);
  expect_same_course(course_of_ranks(Fabric::kSharedMemory, 4, siamese_task(), pipeline("gpipe", "2"), ten), one);
}

TEST(PipelineRanks, have_the_optimizers_state_of_their_stage) {
  const auto one = make_strategy(World::single(), small_task(), on_one(pipeline()));
  course_of(*one);
  run_ranks(3, [&](World& world) {
    const auto strategy = make_strategy(world, small_task(), pipeline());
    for (int step = 0; step < kSteps; ++step) {
      strategy->forward_backward(batch_of(step));
      strategy->update();
    }
    const auto parameters = strategy->model().parameters(), expected = one->model().parameters();
    for (size_t i = 0; i < parameters.size(); ++i)
      if (is_held(parameters[i])) {
        EXPECT_TRUE(torch::allclose(strategy->optimizer().state_of(parameters[i]).at("momentum_buffer"),
                                    one->optimizer().state_of(expected[i]).at("momentum_buffer"), 1e-9, 1e-12));
      }
  });
}

struct ModelCase {
  const char* name;
  Task (*task)();
};

Task tiny_gpt() {
  return gpt_task("gpt", {.vocabulary = 64, .context = 8, .layers = 3, .heads = 2, .width = 32, .dropout = 0});
}
Task gpt_in_float64() { return in_float64(tiny_gpt()); }

class PipelineModel : public ::testing::TestWithParam<std::tuple<ModelCase, int>> {};
INSTANTIATE_TEST_SUITE_P(
    Models, PipelineModel,
    ::testing::Combine(::testing::Values(ModelCase{"sequential", small_task}, ModelCase{"tied", tied_task},
                                         ModelCase{"gpt", tiny_gpt}, ModelCase{"gpt_in_float64", gpt_in_float64},
                                         ModelCase{"resnet", [] { return model_task("resnet18-32"); }},
                                         ModelCase{"inception", [] { return model_task("inception"); }}),
                       ::testing::Values(2, 4)),
    [](const auto& test) {
      return std::string(std::get<0>(test.param).name) + "_in_" + std::to_string(std::get<1>(test.param));
    });

TEST_P(PipelineModel, begins_with_the_values_of_one_device_and_holds_its_own_pieces_only) {
  const auto& [model, stages] = GetParam();
  const auto one = make_strategy(World::single(), model.task(), on_one(pipeline()));
  const auto expected = one->model().named_parameters().pairs();
  const auto buffers = one->model().named_buffers().pairs();
  run_ranks(stages, [&](World& world) {
    const auto strategy = make_strategy(world, model.task(), pipeline());
    auto& module = strategy->model();
    const auto values = gathered(world, module);
    ASSERT_EQ(values.size(), expected.size());
    size_t foreign = 0;
    for (size_t i = 0; i < expected.size(); ++i) {
      EXPECT_TRUE(torch::equal(values[i], expected[i].second)) << expected[i].first;
      foreign += is_held(module.named_parameters()[i].value()) ? 0 : 1;
    }
    EXPECT_GT(foreign, 0U);
    for (const auto& [name, buffer] : buffers)
      EXPECT_TRUE(!is_held(module.named_buffers()[name]) || torch::equal(module.named_buffers()[name], buffer)) << name;
  });
}

TEST(PipelineRanks, have_the_output_on_the_last_stage) {
  const auto one = make_strategy(World::single(), small_task(), on_one(pipeline()));
  const torch::Tensor expected = one->forward(batch_of(0));
  run_ranks(3, [&](World& world) {
    const auto strategy = make_strategy(world, small_task(), pipeline());
    const torch::NoGradGuard no_grad;
    const torch::Tensor output = strategy->forward(batch_of(0));
    ASSERT_EQ(output.defined(), world.rank() == 2);
    EXPECT_TRUE(!output.defined() || torch::allclose(output, expected, 1e-9, 1e-12));
  });
}

// The first arrangement goes by bytes: the second layer is on the second stage. The other one goes by time: the last
// layer is slow, and has a stage for itself.
TEST(PipelineRanks, take_their_pieces_and_state_along_when_the_measured_cut_is_another) {
  Task task = small_task();
  task.make_model = [] {
    torch::nn::Sequential net(torch::nn::Linear(6, 8), torch::nn::Tanh(), torch::nn::Linear(8, 8), torch::nn::Tanh(),
                              torch::nn::Linear(8, 4));
    net->to(torch::kFloat64);
    return net.ptr();
  };
  task.stages = [](torch::nn::Module& model) {
    auto pieces = pieces_of(dynamic_cast<torch::nn::SequentialImpl&>(model));
    pieces[4].forward = [forward = pieces[4].forward](const Tensors& x) {
      for (int i = 0; i < 2000; ++i) static_cast<void>(x[0].tanh());
      return forward(x);
    };
    return pieces;
  };
  const auto train = [&](Strategy& strategy, const World& world) {
    for (const torch::Tensor& parameter : strategy.model().parameters())
      if (is_held(parameter))
        strategy.optimizer().set_state(
            parameter, {{"momentum_buffer", torch::ones_like(parameter.detach())}, {"step", torch::ones({})}});
    for (int step = 0; step < 3; ++step) {
      strategy.forward_backward(batch_of(step));
      strategy.update();
    }
    return gathered(world, strategy.model());
  };
  const Course one{train(*make_strategy(World::single(), task, on_one(pipeline())), World::single()), {}};
  run_ranks(2, [&](World& world) {
    const auto strategy = make_strategy(world, task, pipeline());
    const auto last_before = is_held(strategy->model().parameters()[2]);
    expect_same_course({train(*strategy, world), {}}, one);
    EXPECT_EQ(is_held(strategy->model().parameters()[2]), world.rank() == 0);
    EXPECT_EQ(last_before, world.rank() == 1);
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
    for (size_t i = 0; i < sent.size(); ++i) {
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

// The header of one tensor, {count, dtype, on host, requires_grad, memory format, dimensions, sizes…}, with one number
// that can't be right.
TEST(TensorMessages, refuse_a_header_with_an_impossible_number) {
  constexpr int64_t kFloat = 6, kLong = 4, kMuch = int64_t{1} << 40;
  struct Case {
    std::vector<int64_t> header;
    const char* says;
  };
  for (const Case& each :
       {Case{{-1}, "number of tensors is -1"}, Case{{97}, "number of tensors is 97"},
        Case{{kMuch}, "number of tensors"}, Case{{1, 300}, "dtype is 300"}, Case{{1, -2}, "dtype is -2"},
        Case{{1, 22}, "unknown dtype 22"}, Case{{1, kFloat, 2}, "whether it is on the host is 2"},
        Case{{1, kFloat, 1, 7}, "requires_grad is 7"},
        Case{{1, kLong, 1, 1, 0, 1, 1}, "integers that require gradients"},
        Case{{1, kFloat, 1, 0, 9}, "memory format is 9"}, Case{{1, kFloat, 1, 0, 2, 1, 5}, "memory format"},
        Case{{1, kFloat, 1, 0, 0, -3}, "dimensions is -3"}, Case{{1, kFloat, 1, 0, 0, 96}, "no place for size"},
        Case{{1, kFloat, 1, 0, 0, 1, -5}, "size is -5"},
        Case{{1, kFloat, 1, 0, 0, 2, kMuch, kMuch}, "too many elements"},
        Case{{1, kFloat, 1, 0, 0, 1, kMuch}, "this machine's memory"}})
    run_ranks(2, [&](World& world) {
      if (world.rank() == 0) {
        const torch::Tensor header = torch::zeros({96}, torch::kInt64);
        header.narrow(0, 0, std::ssize(each.header)).copy_(torch::tensor(each.header, torch::kInt64));
        world.send(header, 1, 5);
      } else {
        EXPECT_TRUE(contains(message_of<MismatchError>([&] { receive_tensors(world, 0, 5); }), each.says));
      }
    });
}

TEST(TensorMessages, refuse_a_malformed_optimizers_state) {
  const torch::Tensor name = torch::tensor({109}, torch::kUInt8), value = torch::ones({3});
  EXPECT_EQ(state_in({name, value}).count("m"), 1U);
  for (const Tensors& wrong :
       {Tensors{name}, Tensors{value, value}, Tensors{torch::Tensor(), value}, Tensors{name, {}}})
    message_of<MismatchError>([&] { state_in(wrong); });
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
