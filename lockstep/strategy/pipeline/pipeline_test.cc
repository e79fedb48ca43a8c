// SPDX-License-Identifier: Apache-2.0
#include "lockstep/strategy.h"
#include "lockstep/strategy/option_names.h"

#include <ATen/Parallel.h>

#include <atomic>
#include <filesystem>
#include <iterator>
#include <map>
#include <thread>

#include "lockstep/deadline.h"
#include "lockstep/models.h"
#include "lockstep/strategy/pipeline/cut.h"
#include "lockstep/strategy/pipeline/stage.h"
#include "tests/strategies.h"
#include "tests/support.h"

namespace lockstep {
namespace {

using namespace testing;

StrategyOptions pipeline(int devices, const std::string& schedule = "1f1b", const std::string& stages = "") {
  return {.kind = StrategyKind::kPipeline,
          .optimizer = SGDOptions{.lr = 0.1, .momentum = 0.9},
          .seed = 4,
          .devices = devices,
          .pipeline = {.stages = stages, .schedule = value_named<PipelineSchedule>(schedule, "--pipeline-schedule")}};
}

class PipelineOfSize : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Sizes, PipelineOfSize, ::testing::Values(1, 2, 3, 4));

TEST_P(PipelineOfSize, trains_as_one_device_does_with_every_schedule) {
  const Course one = on_one_device(small_task(), pipeline(GetParam()));
  for (const char* schedule : {"naive", "gpipe", "1f1b"})
    expect_same_course(course_of(small_task(), pipeline(GetParam(), schedule)), one);
}

TEST(Pipeline, trains_with_named_stages) {
  const Course one = on_one_device(small_task(), pipeline(3));
  expect_same_course(course_of(small_task(), pipeline(3, "1f1b", "0-0,1-4,5-6")), one);
  expect_same_course(course_of(small_task(), pipeline(3, "1f1b", "0,1-4,5-6")), one);
}

TEST(Pipeline, trains_with_replicas_of_each_stage) {
  const Course one = on_one_device(small_task(), pipeline(4));
  expect_same_course(course_of(small_task(), pipeline(4, "1f1b", "2")), one);         // 2 x 2
  expect_same_course(course_of(small_task(), pipeline(6, "gpipe", "0-1,2-6")), one);  // 2 x 3
  expect_same_course(course_of(small_task(), pipeline(3, "1f1b", "1")), one);         // 1 x 3
}

TEST(Pipeline, trains_a_layer_that_two_stages_use) {
  expect_same_course(course_of(tied_task(), pipeline(3)), on_one_device(tied_task(), pipeline(3)));
}

TEST(Pipeline, trains_with_fewer_samples_than_micro_batches) {
  expect_same_course(course_of(small_task(), pipeline(4, "1f1b", "2"), 5, 1),
                     on_one_device(small_task(), pipeline(4), 5, 1));
}

// The first piece passes on what the last one adds, and a mask without a gradient.
Task with_skip() {
  Task task = small_task();
  task.make_model = [] {
    torch::nn::Sequential net(torch::nn::Linear(6, 6), torch::nn::Linear(6, 6), torch::nn::Linear(6, 4));
    net->to(torch::kFloat64);
    return net.ptr();
  };
  task.stages = [](torch::nn::Module& model) {
    std::vector<torch::nn::LinearImpl*> layers;
    for (const auto& child : model.children()) layers.push_back(child->as<torch::nn::LinearImpl>());
    return std::vector<Piece>{
        {"in",
         {layers[0]},
         [=](const Tensors& x) {
           return Tensors{layers[0]->forward(x[0]).tanh(), x[0], x[0].gt(0)};
         }},
        {"inner",
         {layers[1]},
         [=](const Tensors& x) {
           return Tensors{layers[1]->forward(x[0]) * x[2] + x[0], x[1]};
         }},
        {"out", {layers[2]}, [=](const Tensors& x) { return Tensors{layers[2]->forward(x[0] + x[1])}; }}};
  };
  task.forward = [stages = task.stages](torch::nn::Module& model, const torch::Tensor& data) {
    return run_pieces(stages(model), data);
  };
  return task;
}

TEST(Pipeline, passes_skip_connections_over_a_cut) {
  expect_same_course(course_of(with_skip(), pipeline(3)), on_one_device(with_skip(), pipeline(3)));
}

TEST(Pipeline, cuts_branches_that_meet_again) {
  const Course one = on_one_device(siamese_task(), pipeline(3));
  for (const char* stages : {"0-1,2-3,4-5", "0-2,3-4,5-5", "0-0,1-1,2-5"})
    expect_same_course(course_of(siamese_task(), pipeline(3, "1f1b", stages)), one);
  expect_same_course(course_of(siamese_task(), pipeline(6, "gpipe")), one);
  expect_same_course(course_of(siamese_task(), pipeline(4, "1f1b", "2")), one);
}

Course course_on(const Task& task, const StrategyOptions& options, const Batch& batch, int steps) {
  const auto strategy = strategy_of(task, options);
  Course course;
  for (int step = 0; step < steps; ++step) {
    course.losses.push_back(strategy->forward_backward(batch).mean_loss);
    strategy->update();
  }
  course.parameters = values_of(strategy->model());
  return course;
}

TEST(Pipeline, trains_a_gpt_with_a_shared_embedding) {
  const Task task =
      in_float64(gpt_task("gpt", {.vocabulary = 11, .context = 5, .layers = 2, .heads = 2, .width = 8, .dropout = 0}));
  const torch::Tensor tokens = torch::randint(0, 11, {6, 5}, torch::kInt64);
  const Batch batch{tokens, tokens.roll(-1, 1)};
  const Course one = course_on(task, on_one(pipeline(1)), batch, kSteps);
  expect_same_course(course_on(task, pipeline(4), batch, kSteps), one);
  expect_same_course(course_on(task, pipeline(4, "1f1b", "2"), batch, kSteps), one);
}

TEST(Pipeline, draws_the_same_dropout_wherever_the_model_is_cut) {
  Task task = small_task();
  task.stages = [](torch::nn::Module& model) {
    std::vector<Piece> stages = pieces_of(dynamic_cast<torch::nn::SequentialImpl&>(model));
    for (Piece& stage : stages)
      stage.forward = [forward = stage.forward](const Tensors& x) {
        return Tensors{torch::dropout(forward(x)[0], 0.2, true)};
      };
    return stages;
  };
  expect_same_bits(course_of(task, pipeline(2, "1f1b", "0-3,4-6")),
                   course_of(task, pipeline(3, "1f1b", "0-0,1-1,2-6")));
}

// One micro-batch, so that batch normalisation sees what it sees on one device.
TEST(Pipeline, trains_a_resnet_over_ten_devices) {
  Task task = in_float64(
      classification_task<ResNet>("resnet18", ResNetOptions{.layers = 18, .classes = 10, .small_images = true}));
  StrategyOptions options = pipeline(10, "1f1b", "0,1,2,3,4,5,6,7,8,9");
  options.pipeline.micro_batches = 1;
  std::get<SGDOptions>(options.optimizer).lr = 0.01;
  const auto generator = at::make_generator<at::CPUGeneratorImpl>(uint64_t{3});
  const Batch batch{torch::randn({3, 3, 12, 12}, generator, torch::kFloat64), torch::tensor({1, 2, 3})};
  at::set_num_threads(1);
  expect_same_course(course_on(task, options, batch, 1), course_on(task, on_one(options), batch, 1));
}

TEST(Pipeline, keeps_fewer_micro_batches_with_1f1b_than_with_gpipe) {
  const auto in_flight = [](const std::string& schedule) {
    StrategyOptions options = pipeline(2, schedule, "0-2,3-6");
    options.pipeline.micro_batches = 8;
    const auto strategy = make_strategy(World::single(), small_task(), options);
    strategy->forward_backward(batch_of(0, 16));
    const Report report = strategy->report();
    return std::map<std::string, double>(report.begin(), report.end());
  };
  auto gpipe = in_flight("gpipe"), one = in_flight("1f1b");
  EXPECT_EQ(gpipe["stage_0_in_flight"], 8);
  EXPECT_EQ(one["stage_0_in_flight"], 2);
  EXPECT_EQ(one["stage_1_in_flight"], 1);
  EXPECT_GT(gpipe["stage_0_bytes"], one["stage_0_bytes"]);
  EXPECT_DOUBLE_EQ(one["ideal_bubble"], 1.0 / 9);
  EXPECT_GT(one["bubble"], 0);
  EXPECT_LT(one["bubble"], 1);
}

TEST(Pipeline, ends_with_the_exception_of_one_stage) {
  Task task = with_skip();
  task.stages = [stages = task.stages](torch::nn::Module& model) {
    auto pieces = stages(model);
    pieces[1].forward = [](const Tensors&) -> Tensors { throw DataError({.what = "thrown in the middle"}); };
    return pieces;
  };
  const auto strategy = make_strategy(World::single(), task, pipeline(3, "1f1b", "0-0,1-1,2-2"));
  const Stopwatch watch;
  EXPECT_TRUE(
      contains(message_of<DataError>([&] { strategy->forward_backward(batch_of(0)); }), "thrown in the middle"));
  EXPECT_LT(watch.seconds(), testing::kAtOnce);
}

// The stage that hangs outlives the strategy: what it uses must still be there when its function returns.
ptrdiff_t running_threads() { return std::distance(std::filesystem::directory_iterator("/proc/self/task"), {}); }

TEST(Pipeline, names_a_stage_that_hangs) {
  const auto go_on = std::make_shared<std::atomic<bool>>(false);  // read by the thread that is left behind
  std::thread([] {}).join();  // with the first thread, a sanitizer starts one of its own
  const ptrdiff_t threads_before = running_threads();
  Task task = with_skip();
  task.stages = [go_on, stages = task.stages](torch::nn::Module& model) {
    auto pieces = stages(model);
    pieces[2].forward = [go_on, forward = pieces[2].forward](const Tensors& x) {
      while (!*go_on) std::this_thread::yield();
      return forward(x);
    };
    return pieces;
  };
  StrategyOptions options = pipeline(3, "1f1b", "0-0,1-1,2-2");
  options.timeout = std::chrono::milliseconds(200);
  const Stopwatch watch;
  EXPECT_TRUE(contains(
      message_of<PeerLost>([&] { make_strategy(World::single(), task, options)->forward_backward(batch_of(0)); }),
      "cpu:"));
  EXPECT_LT(watch.seconds(), testing::kAtOnce);
  *go_on = true;
  const Deadline deadline = Deadline::after(std::chrono::seconds(10));
  while (running_threads() > threads_before && !deadline.passed()) std::this_thread::yield();
  EXPECT_LE(running_threads(), threads_before) << "a thread is still there after its function has returned";
}

TEST(Pipeline, refuses_a_model_that_can_not_be_cut) {
  Task task = small_task();
  task.make_model = [] { return torch::nn::Linear(6, 4).ptr(); };
  EXPECT_TRUE(contains(message_of<UsageError>([&] { make_strategy(World::single(), task, pipeline(2)); }),
                       "the model of small can't be cut into pieces"));
}

using Steps = std::vector<PipelineStep>;
PipelineStep forward(int i) { return {true, i}; }
PipelineStep backward(int i) { return {false, i}; }

TEST(PipelineSchedule, orders_the_steps_as_published) {
  EXPECT_EQ(steps_of_stage(PipelineSchedule::kGPipe, 0, 2, 2),
            (Steps{forward(0), forward(1), backward(0), backward(1)}));
  EXPECT_EQ(steps_of_stage(PipelineSchedule::k1F1B, 0, 2, 3),
            (Steps{forward(0), forward(1), backward(0), forward(2), backward(1), backward(2)}));
  EXPECT_EQ(steps_of_stage(PipelineSchedule::k1F1B, 1, 2, 3),
            (Steps{forward(0), backward(0), forward(1), backward(1), forward(2), backward(2)}));
}

// Micro-batches that have gone forward and not yet back, at most.
int most_in_flight(const std::vector<PipelineStep>& steps) {
  int now = 0, most = 0;
  for (const PipelineStep& step : steps) {
    now += step.forward ? 1 : -1;
    most = std::max(most, now);
  }
  return most;
}

TEST(PipelineSchedule, keeps_one_micro_batch_per_stage_behind_with_1f1b) {
  for (int stage = 0; stage < 4; ++stage)
    EXPECT_EQ(most_in_flight(steps_of_stage(PipelineSchedule::k1F1B, stage, 4, 8)), 4 - stage);
  EXPECT_EQ(most_in_flight(steps_of_stage(PipelineSchedule::kGPipe, 0, 4, 8)), 8);
}

TEST(PipelineCut, minimises_the_cost_of_the_slowest_stage) {
  EXPECT_EQ(to_string(balanced_cut({1, 1, 1, 1}, 2)), "0-1,2-3");
  EXPECT_EQ(to_string(balanced_cut({5, 1, 1, 1, 1}, 2)), "0-0,1-4");
  EXPECT_EQ(to_string(balanced_cut({1, 2, 3, 4, 5, 6}, 3)), "0-2,3-4,5-5");
  EXPECT_EQ(to_string(balanced_cut({0, 0, 9}, 3)), "0-0,1-1,2-2");
}

TEST(PipelineCut, reads_numbers_and_ranges) {
  EXPECT_EQ(parse_stages("", 3, 7).stages, 3);
  EXPECT_EQ(parse_stages("2", 4, 7).stages, 2);
  EXPECT_EQ(to_string(parse_stages("0-2,3,4-6", 3, 7).cut), "0-2,3-3,4-6");
}

TEST(PipelineCut, explains_bad_stages) {
  const auto refusal = [](const std::string& text, int devices = 2) {
    return message_of<UsageError>([&] { parse_stages(text, devices, 7); });
  };
  EXPECT_TRUE(contains(refusal("0-2,4-6"), "stage 1 does not begin with piece 3"));
  EXPECT_TRUE(contains(refusal("0-2,3-5"), "it ends with piece 5"));
  EXPECT_TRUE(contains(refusal("0-2,3-9"), "it ends with piece 9"));
  EXPECT_TRUE(contains(refusal("a,b"), "\"a\" is not a number"));
  EXPECT_TRUE(contains(refusal("3", 4), "3 stages on 4 devices"));
  EXPECT_TRUE(contains(refusal("", 8), "8 stages of 7 pieces"));
}

TEST(PipelineCut, measures_every_piece_without_changing_the_model) {
  const Task task = small_task();
  const auto model = task.make_model();
  const auto before = values_of(*model);
  Tensors tensors = {batch_of(0).data};
  const auto costs = measure_pieces(pieces_of(task, *model), *model, tensors);
  EXPECT_EQ(costs.size(), 7U);
  for (const double cost : costs) EXPECT_GT(cost, 0);
  for (const torch::Tensor& parameter : model->parameters()) EXPECT_FALSE(parameter.grad().defined());
  EXPECT_TRUE(model->is_training());
  for (size_t i = 0; i < before.size(); ++i) EXPECT_TRUE(torch::equal(before[i], model->parameters()[i]));
}

}  // namespace
}  // namespace lockstep
