// SPDX-License-Identifier: Apache-2.0
#include "lockstep/train/loop.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <torch/nn/functional/dropout.h>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>

#include <array>
#include <atomic>
#include <cmath>
#include <functional>
#include <iomanip>
#include <limits>
#include <mutex>
#include <thread>

#include <nlohmann/json.hpp>

#include "lockstep/base/files/file.h"
#include "lockstep/base/text.h"
#include "lockstep/checkpoint/safetensors.h"
#include "lockstep/models.h"
#include "lockstep/train/builtin.h"
#include "lockstep/train/evaluate.h"
#include "lockstep/train/reports/metrics.h"
#include "lockstep/train/state/snapshot.h"
#include "tests/support.h"

namespace lockstep {
namespace {

using testing::contains;
using testing::message_of;
using testing::TempFolder;

// Points on two sides of a line; sample `poisoned` holds NaN.
class Points : public Dataset {
 public:
  explicit Points(int64_t size, int64_t poisoned = -1) {
    const auto generator = at::make_generator<at::CPUGeneratorImpl>(static_cast<uint64_t>(9));
    data_ = torch::randn({size, 4}, generator);
    target_ = data_.sum(1).gt(0).to(torch::kInt64);
    if (poisoned >= 0) data_[poisoned][0] = std::numeric_limits<float>::quiet_NaN();
  }
  std::string name() const override { return "points"; }
  int64_t size() const override { return data_.size(0); }
  Batch make_batch(std::span<const int64_t> indices) const override {
    const torch::Tensor index = torch::tensor(std::vector<int64_t>(indices.begin(), indices.end()), torch::kInt64);
    return {data_.index_select(0, index), target_.index_select(0, index)};
  }

 private:
  torch::Tensor data_;
  torch::Tensor target_;
};

// Dropout, so that a resumed run needs the generators too.
Task dropout_task() {
  return {
      .make_model = [] { return torch::nn::Linear(4, 2).ptr(); },
      .forward =
          [](torch::nn::Module& model, const torch::Tensor& data) {
            const auto options = torch::nn::functional::DropoutFuncOptions().p(0.2).training(model.is_training());
            return dynamic_cast<torch::nn::LinearImpl&>(model).forward(torch::nn::functional::dropout(data, options));
          },
      .loss = [](const torch::Tensor& output,
                 const torch::Tensor& target) { return torch::cross_entropy_loss(output, target); },
      .correct = [](const torch::Tensor& output,
                    const torch::Tensor& target) { return output.argmax(1).eq(target).sum(); },
      .name = "points",
      .stages =
          [](torch::nn::Module& model) {
            return std::vector<Piece>{make_piece(
                "all", {&model}, [&model](const torch::Tensor& data) { return dropout_task().forward(model, data); })};
          }};
}

TrainOptions small_options() {
  TrainOptions options;
  options.model = "points";
  options.epochs = 3;
  options.loader.batch_size = 8;
  options.strategy.kind = StrategyKind::kSingle;
  options.strategy.optimizer = SGDOptions{.lr = 0.1, .momentum = 0.9};
  options.strategy.pipeline.micro_batches = 2;
  options.learning_rate.schedule = ScheduleKind::kCosine;
  options.quiet = true;
  return options;
}

struct Outcome {
  std::vector<torch::Tensor> parameters;
  Json metrics;
};

Outcome run_alone(const TrainOptions& options, const Datasets& datasets, const Task& task = dropout_task()) {
  const World world = World::single();
  const auto strategy = make_strategy(world, task, options.strategy);
  Outcome outcome;
  outcome.metrics = TrainingLoop(world, task, datasets, *strategy, options).run();
  for (const auto& parameter : strategy->model().parameters()) outcome.parameters.push_back(parameter.detach().clone());
  return outcome;
}

Datasets points(int64_t poisoned = -1) {
  return {.train = std::make_shared<Points>(50, poisoned), .validation = std::make_shared<Points>(31)};
}

void expect_same_bits(const Outcome& a, const Outcome& b) {
  ASSERT_EQ(a.parameters.size(), b.parameters.size());
  for (size_t i = 0; i < a.parameters.size(); ++i) EXPECT_TRUE(torch::equal(a.parameters[i], b.parameters[i]));
  EXPECT_EQ(a.metrics["train_loss"], b.metrics["train_loss"]);
  EXPECT_EQ(a.metrics["val_accuracy"], b.metrics["val_accuracy"]);
  EXPECT_EQ(a.metrics["steps"], b.metrics["steps"]);
  EXPECT_EQ(a.metrics["samples"], b.metrics["samples"]);
}

class Resuming : public ::testing::TestWithParam<std::tuple<std::string, int>> {};
INSTANTIATE_TEST_SUITE_P(Points, Resuming,
                         ::testing::Combine(::testing::Values("sgd", "adamw"), ::testing::Values(1, 6, 7, 10, 20)));

TEST_P(Resuming, continues_with_the_bits_of_an_uninterrupted_run) {
  const TempFolder folder;
  TrainOptions options = small_options();
  options.strategy.optimizer = optimizer_options(std::get<0>(GetParam()), {{"lr", 0.1}, {"momentum", 0.9}});
  const Outcome uninterrupted = run_alone(options, points());

  options.checkpoint_dir = folder.path();
  options.checkpoint_every = 1;
  options.max_steps = std::get<1>(GetParam());
  run_alone(options, points());
  options.max_steps = 0;
  options.resume = true;
  expect_same_bits(run_alone(options, points()), uninterrupted);
}

struct StrategyCase {
  std::string name;
  void (*choose)(StrategyOptions& options);
};

class ResumingWith : public ::testing::TestWithParam<StrategyCase> {};
INSTANTIATE_TEST_SUITE_P(
    Strategies, ResumingWith,
    ::testing::Values(
        StrategyCase{"float16", [](auto& o) { o.precision = Precision::kFloat16; }},
        StrategyCase{"towers", [](auto& o) { o.kind = StrategyKind::kTowers, o.devices = 2; }},
        StrategyCase{"towers_updated_on_the_cpu",
                     [](auto& o) { o.kind = StrategyKind::kTowers, o.devices = 3, o.towers.update = UpdateOn::kCpu; }},
        StrategyCase{"data_parallel", [](auto& o) { o.kind = StrategyKind::kDataParallel, o.devices = 3; }},
        StrategyCase{"averaging",
                     [](auto& o) { o.kind = StrategyKind::kAveraging, o.devices = 2, o.averaging.every = 3; }},
        StrategyCase{"averaging_with_an_outer_step",
                     [](auto& o) {
                       o.kind = StrategyKind::kAveraging, o.devices = 2;
                       o.averaging = {.every = 2, .outer_lr = 0.7, .outer_momentum = 0.9};
                     }},
        StrategyCase{"averaging_in_the_background",
                     [](auto& o) {
                       o.kind = StrategyKind::kAveraging, o.devices = 2;
                       o.averaging = {
                           .every = 3, .outer_lr = 0.7, .outer_momentum = 0.9, .parts = 2, .delay = 2, .mix = 0.5};
                     }},
        StrategyCase{"pipeline",
                     [](auto& o) { o.kind = StrategyKind::kPipeline, o.devices = 2, o.pipeline.stages = "1"; }}),
    [](const auto& test) { return test.param.name; });

// Both runs save at the same steps: averaging makes its replicas one model there.
TEST_P(ResumingWith, continues_with_the_bits_of_an_uninterrupted_run) {
  const TempFolder whole, parts;
  TrainOptions options = small_options();
  GetParam().choose(options.strategy);
  options.checkpoint_every = 4;
  options.checkpoint_dir = whole.path();
  const Outcome uninterrupted = run_alone(options, points());
  options.checkpoint_dir = parts.path();
  options.max_steps = 12;
  run_alone(options, points());
  options.max_steps = 0;
  options.resume = true;
  expect_same_bits(run_alone(options, points()), uninterrupted);
}

// Three layers for dropout_task()'s points, without dropout, in five pieces. The first has no parameters.
Task layered_task() {
  Task task = dropout_task();
  task.make_model = [] {
    return torch::nn::Sequential(torch::nn::Tanh(), torch::nn::Linear(4, 40), torch::nn::Tanh(),
                                 torch::nn::Linear(40, 40), torch::nn::Linear(40, 2))
        .ptr();
  };
  task.forward = [](torch::nn::Module& model, const torch::Tensor& data) {
    return dynamic_cast<torch::nn::SequentialImpl&>(model).forward(data);
  };
  task.stages = nullptr;
  return task;
}

// Trains on one device, or as a pipeline whose stages are ranks.
Json run_on_stages(int stages, TrainOptions options) {
  options.strategy.kind = StrategyKind::kPipeline;
  Json metrics;
  const auto train = [&](const World& world) {
    const auto strategy = make_strategy(world, layered_task(), options.strategy);
    const Json mine = TrainingLoop(world, layered_task(), points(), *strategy, options).run();
    if (world.rank() == 0) metrics = mine;
  };
  stages == 1 ? train(World::single()) : run_ranks(stages, train);
  return metrics;
}

class ResumingOnStages : public ::testing::TestWithParam<std::tuple<int, int>> {};
INSTANTIATE_TEST_SUITE_P(Stages, ResumingOnStages,
                         ::testing::Values(std::tuple{3, 1}, std::tuple{1, 3}, std::tuple{2, 4}));

TEST_P(ResumingOnStages, continues_a_run_of_another_number_of_stages) {
  const auto [before, after] = GetParam();
  const TempFolder folder;
  TrainOptions options = small_options();
  options.strategy.optimizer = AdamWOptions{.lr = 0.01};
  const Json uninterrupted = run_on_stages(1, options);
  options.checkpoint_dir = folder.path();
  options.max_steps = 10;
  run_on_stages(before, options);
  options.max_steps = 0;
  options.resume = true;
  const Json resumed = run_on_stages(after, options);
  EXPECT_EQ(resumed["steps"], uninterrupted["steps"]);
  EXPECT_NEAR(resumed["train_loss"].get<double>(), uninterrupted["train_loss"].get<double>(), 1e-5);
  EXPECT_NEAR(resumed["val_accuracy"].get<double>(), uninterrupted["val_accuracy"].get<double>(), 1e-9);
}

// Both files are of the same model after the same steps.
TEST(TrainingLoop, saves_the_same_tensors_from_one_device_and_from_stages) {
  const TempFolder one, four;
  TrainOptions options = small_options();
  options.max_steps = 3;
  options.checkpoint_dir = one.path();
  run_on_stages(1, options);
  options.checkpoint_dir = four.path();
  options.strategy.pipeline.stages = "0-0,1-1,2-3,4-4";  // rank 0 holds nothing
  run_on_stages(4, options);
  TensorFile expected = load_safetensors(one / "step-00000003.safetensors");
  const TensorFile saved = load_safetensors(four / "step-00000003.safetensors");
  for (const auto& [name, tensor] : expected.tensors) {
    if (name.starts_with("rng.")) continue;
    ASSERT_TRUE(saved.tensors.contains(name)) << name;
    EXPECT_TRUE(torch::allclose(saved.tensors.at(name), tensor, 1e-4, 1e-6)) << name;
  }
  EXPECT_EQ(saved.tensors.size(), expected.tensors.size() + 3);  // generators
}

TEST(TrainingLoop, resumes_from_the_checkpoint_before_a_damaged_one) {
  const TempFolder folder;
  TrainOptions options = small_options();
  const Outcome uninterrupted = run_alone(options, points());
  options.checkpoint_dir = folder.path();
  options.max_steps = 14;  // the ends of epochs 0 and 1
  run_alone(options, points());
  write_file(folder / "step-00000014.safetensors", "damaged");
  options.max_steps = 0;
  options.resume = true;
  expect_same_bits(run_alone(options, points()), uninterrupted);
}

TEST(TrainingLoop, resumes_from_shards) {
  const TempFolder folder;
  TrainOptions options = small_options();
  const Outcome uninterrupted = run_alone(options, points());
  options.checkpoint_dir = folder.path();
  options.checkpoint_shard_bytes = 40;
  options.max_steps = 8;
  run_alone(options, points());
  EXPECT_TRUE(folder.has("step-00000008.safetensors.index.json"));
  options.max_steps = 0;
  options.resume = true;
  expect_same_bits(run_alone(options, points()), uninterrupted);
}

TEST(TrainingLoop, refuses_to_resume_with_other_options) {
  const TempFolder folder;
  TrainOptions options = small_options();
  options.checkpoint_dir = folder.path();
  run_alone(options, points());
  options.resume = true;
  std::get<SGDOptions>(options.strategy.optimizer).lr = 0.7;
  EXPECT_TRUE(contains(message_of<CheckpointError>([&] { run_alone(options, points()); }),
                       "the checkpoint was made with lr = 0.1, now it is 0.7"));
  std::get<SGDOptions>(options.strategy.optimizer).lr = 0.1;
  options.learning_rate.drop_factor = 0.5;
  EXPECT_TRUE(contains(message_of<CheckpointError>([&] { run_alone(options, points()); }), "drop_factor"));
}

// As the error says that a number which is not finite ends with.
TEST(TrainingLoop, goes_back_to_a_step_with_a_lower_learning_rate) {
  const TempFolder folder;
  TrainOptions options = small_options();
  options.checkpoint_dir = folder.path();
  options.checkpoint_every = 1;
  const std::string message = message_of<NonFiniteError>([&] { run_alone(options, points(/*poisoned=*/17)); });
  EXPECT_TRUE(contains(message, "--resume --from-step STEP and a lower --lr"));
  std::vector<int64_t> steps;
  for (const auto& entry : std::filesystem::directory_iterator(folder.path()))
    if (entry.path().extension() == ".safetensors")
      steps.push_back(std::stoll(entry.path().filename().string().substr(5)));
  ASSERT_EQ(steps.size(), 2U);
  options.resume = true;
  options.from_step = std::ranges::min(steps);
  std::get<SGDOptions>(options.strategy.optimizer).lr = 0.01;
  EXPECT_EQ(run_alone(options, points()).metrics["steps"], 21);
  EXPECT_TRUE(folder.has(concat("step-", std::setw(8), std::setfill('0'), std::ranges::max(steps),
                                ".safetensors.after-", options.from_step)));
  options.from_step = 0;  // from now on it has the new one
  EXPECT_EQ(run_alone(options, points()).metrics["steps"], 21);
}

TEST(Snapshot, looks_for_numbers_that_are_not_finite_in_every_dtype) {
  for (const auto dtype :
       {torch::kFloat32, torch::kFloat64, torch::kBFloat16, torch::kFloat8_e4m3fn, torch::kFloat8_e5m2}) {
    const torch::Tensor good = torch::ones({3}).to(dtype), bad = torch::tensor({1.0F, std::nanf("")}).to(dtype);
    EXPECT_EQ(first_non_finite({{"good", good}, {"bad", bad}}), "bad") << dtype;
  }
}

TEST(TrainingLoop, refuses_a_folder_that_holds_another_run) {
  const TempFolder folder;
  TrainOptions options = small_options();
  options.checkpoint_dir = folder.path();
  run_alone(options, points());
  EXPECT_TRUE(
      contains(message_of<CheckpointError>([&] { run_alone(options, points()); }), "checkpoints of another run"));
}

TEST(TrainingLoop, saves_the_last_step_whatever_the_interval) {
  const TempFolder folder;
  TrainOptions options = small_options();
  options.checkpoint_dir = folder.path();
  options.checkpoint_every = 5;
  run_alone(options, points());
  EXPECT_TRUE(folder.has("step-00000021.safetensors"));
}

TEST(TrainingLoop, stops_at_a_loss_that_is_not_finite_and_keeps_the_good_checkpoint) {
  const TempFolder folder;
  TrainOptions options = small_options();
  options.checkpoint_dir = folder.path();
  options.checkpoint_every = 1;
  const std::string message = message_of<NonFiniteError>([&] { run_alone(options, points(/*poisoned=*/17)); });
  EXPECT_TRUE(contains(message, "the loss is nan at step "));
  EXPECT_TRUE(contains(message, "the first that is not finite is the gradient of weight"));
  const auto newest = CheckpointFolder(folder.path()).load_newest();
  for (const auto& [name, tensor] : load_safetensors(newest->path).tensors)
    EXPECT_TRUE(torch::isfinite(tensor).all().item<bool>()) << name;
}

// A checkpoint of this step can't be written: a folder lies where its file would be.
void block_checkpoint(const TempFolder& folder, int step) {
  std::filesystem::create_directories(folder / concat("step-000000", step, ".safetensors/something"));
}

std::map<std::string, int> events_in(const std::string& metrics) {
  std::map<std::string, int> events;
  for (const auto& line : split(read_file(metrics), '\n'))
    if (!line.empty()) ++events[nlohmann::json::parse(line)["event"]];
  return events;
}

TEST(TrainingLoop, goes_on_after_a_checkpoint_that_could_not_be_written) {
  const TempFolder folder;
  TrainOptions options = small_options();
  options.checkpoint_dir = folder.path();
  options.checkpoint_every = 5;
  options.metrics = folder / "metrics";
  block_checkpoint(folder, 10);
  run_alone(options, points());
  EXPECT_FALSE(std::filesystem::is_regular_file(folder / "step-00000010.safetensors"));
  EXPECT_TRUE(folder.has("step-00000020.safetensors"));
  EXPECT_TRUE(folder.has("step-00000021.safetensors"));
  EXPECT_EQ(events_in(options.metrics)["checkpoint"], 4);
}

TEST(TrainingLoop, ends_with_an_error_if_its_last_checkpoint_cannot_be_written) {
  const TempFolder folder;
  TrainOptions options = small_options();
  options.checkpoint_dir = folder.path();
  options.metrics = folder / "metrics";
  block_checkpoint(folder, 21);
  const std::string message = message_of<SystemError>([&] { run_alone(options, points()); });
  EXPECT_TRUE(contains(message, "the checkpoint of the last step, 21, is not saved: can't rename"));
  EXPECT_TRUE(contains(message, "--resume goes on from the newest checkpoint"));
  EXPECT_EQ(events_in(options.metrics)["run"], 1);
}

TEST(TrainingLoop, writes_metrics_in_the_documented_format) {
  const TempFolder folder;
  TrainOptions options = small_options();
  options.metrics = folder / "run.jsonl";
  run_alone(options, points());
  std::map<std::string, int> events;
  nlohmann::json last, start;
  for (const auto& line : split(read_file(options.metrics), '\n')) {
    if (line.empty()) continue;
    last = nlohmann::json::parse(line);
    ++events[last["event"]];
    if (start.is_null()) start = last;
    if (last["event"] != "step") continue;
    for (const char* key : {"epoch", "step", "loss", "seconds", "samples"}) EXPECT_TRUE(last[key].is_number()) << key;
  }
  EXPECT_EQ(events["step"], 21);
  EXPECT_EQ(events["epoch"], 3);
  EXPECT_EQ(last["event"], "run");
  EXPECT_EQ(last["ranks"], 1);
  EXPECT_EQ(last["samples"], 150);
  EXPECT_GT(last["val_accuracy"], 0.5);
  EXPECT_GT(last["each_rank"][0]["backward_seconds"], 0);
  EXPECT_GT(last["each_rank"][0]["peak_rss_bytes"], 0);
  EXPECT_EQ(start["event"], "start");
  EXPECT_EQ(start["settings"]["batch_size"], options.loader.batch_size);
  EXPECT_GT(start["machine"]["cores"], 0);
}

TEST(TrainingLoop, says_which_metrics_file_it_cannot_write) {
  TrainOptions options = small_options();
  options.metrics = "/no/such/folder/run.jsonl";
  EXPECT_TRUE(contains(message_of<SystemError>([&] { run_alone(options, points()); }), "/no/such/folder/run.jsonl"));
}

void train_without_all_metrics(const std::string& file) {
  const TempFolder folder;
  TrainOptions options = small_options();
  options.metrics = file;
  options.checkpoint_dir = folder.path();
  EXPECT_TRUE(contains(message_of<SystemError>([&] { run_alone(options, points()); }),
                       concat("the metrics in ", file, " lack events")));
  EXPECT_TRUE(folder.has("step-00000021.safetensors")) << "it has not come to its end";
}

TEST(TrainingLoop, goes_on_when_metrics_do_not_fit_on_the_disk) { train_without_all_metrics("/dev/full"); }

// A pipe that is full stands for a disk that does not answer.
TEST(TrainingLoop, does_not_wait_for_metrics_that_nobody_takes) {
  const TempFolder folder;
  const std::string file = folder / "metrics";
  ASSERT_EQ(::mkfifo(file.c_str(), 0600), 0);
  const UniqueFd both_ends(::open(file.c_str(), O_RDWR | O_NONBLOCK));
  while (::write(both_ends.get(), "x", 1) == 1) {
  }
  train_without_all_metrics(file);
}

// A pipe that somebody empties now and then stands for a slow disk, which takes 20 ms and more for each record.
TEST(TrainingLoop, waits_for_a_slow_disk_a_tenth_of_a_second_in_all) {
  constexpr int kRecords = 20;
  constexpr auto kNap = std::chrono::milliseconds(10);
  const TempFolder folder;
  const std::string file = folder / "metrics";
  ASSERT_EQ(::mkfifo(file.c_str(), 0600), 0);
  const UniqueFd disk(::open(file.c_str(), O_RDWR | O_NONBLOCK));
  ASSERT_GT(::fcntl(disk.get(), F_SETPIPE_SZ, 4096), 0);
  std::atomic<bool> over{false};
  std::thread reader([&] {
    for (std::array<char, 4096> some; !over; std::this_thread::sleep_for(kNap))
      if (::read(disk.get(), some.data(), some.size()) < 0) continue;
  });
  int waits = 0;
  {
    MetricsFile metrics(file, false);
    for (int i = 0; i < kRecords; ++i) {
      metrics.write({{"event", std::string(3 * 4096, 'x')}});
      const Stopwatch watch;
      metrics.hand_over();
      waits += watch.seconds() > 0.015 ? 1 : 0;
    }
    EXPECT_TRUE(metrics.finish());
  }
  over = true;
  reader.join();
  EXPECT_GT(waits, 0);
  EXPECT_LT(waits, kRecords / 2);
}

TEST(EventCommand, delays_no_event_when_it_reads_none) {
  ::testing::internal::CaptureStderr();
  MetricsFile metrics;
  metrics.pass_on_to("exec sleep 1");
  const Stopwatch watch;
  for (int i = 0; i < 100; ++i) metrics.write({{"event", std::string(100'000, 'x')}});
  EXPECT_LT(watch.seconds(), 1);
  EXPECT_TRUE(metrics.finish());
  EXPECT_LT(watch.seconds(), 5);
  const std::string log = ::testing::internal::GetCapturedStderr();
  EXPECT_TRUE(contains(log, "the command of --on-event: it is too slow")) << log;
  EXPECT_TRUE(contains(log, "100 of 100 records were dropped")) << log;
}

TEST(EventCommand, has_nothing_of_ours_but_stdout_and_stderr) {
  const TempFolder folder;
  const UniqueFd inherited(::open("/dev/null", O_RDONLY));  // without O_CLOEXEC
  MetricsFile metrics;
  metrics.pass_on_to(concat("exec ls /proc/self/fd > ", folder.file("open")));
  metrics.finish();
  EXPECT_EQ(read_file(folder / "open"), "0\n1\n2\n3\n");  // 3: of ls
}

TEST(TrainingLoop, appends_metrics_to_a_line_that_was_cut_off) {
  const TempFolder folder;
  TrainOptions options = small_options();
  options.metrics = folder / "metrics";
  options.checkpoint_dir = folder.path();
  options.max_steps = 2;
  run_alone(options, points());
  const std::string cut_off = R"({"event":"step","ep)";
  write_file(options.metrics, cut_off);
  options.resume = true;
  options.max_steps = 4;
  run_alone(options, points());
  const auto lines = split(read_file(options.metrics), '\n');
  EXPECT_EQ(lines[0], cut_off);
  EXPECT_EQ(nlohmann::json::parse(lines[1])["event"], "resume");
}

TEST(TrainingLoop, trains_on_several_ranks_and_resumes_them) {
  const TempFolder folder;
  const auto run_on_3 = [&](TrainOptions options) {
    Outcome outcome;
    std::mutex mutex;
    run_ranks(3, [&](World& world) {
      Task task = dropout_task();  // without dropout: ranks that are threads share torch's generator
      task.forward = [](torch::nn::Module& model, const torch::Tensor& data) {
        return dynamic_cast<torch::nn::LinearImpl&>(model).forward(data);
      };
      const auto strategy = make_strategy(world, task, options.strategy);
      const Json metrics = TrainingLoop(world, task, points(), *strategy, options).run();
      const std::lock_guard lock(mutex);
      if (world.rank() != 0) return;
      outcome.metrics = metrics;
      for (const auto& p : strategy->model().parameters()) outcome.parameters.push_back(p.detach().clone());
    });
    return outcome;
  };
  TrainOptions options = small_options();
  options.strategy.kind = StrategyKind::kDdp;
  const Outcome uninterrupted = run_on_3(options);
  options.checkpoint_dir = folder.path();
  options.checkpoint_every = 3;
  options.max_steps = 10;
  run_on_3(options);
  options.max_steps = 0;
  options.resume = true;
  expect_same_bits(run_on_3(options), uninterrupted);
}

// Trains layered_task() on two ranks. add: the functions that each rank sets.
void run_on_2(TrainOptions options, const std::function<void(Task& task, int rank, torch::nn::Module& model)>& add,
              const std::function<void(int rank, const Json& run)>& ended = nullptr) {
  options.strategy.kind = StrategyKind::kDdp;
  run_ranks(2, [&](World& world) {
    Task task = layered_task();
    const auto strategy = make_strategy(world, task, options.strategy);
    add(task, world.rank(), strategy->model());
    const Json run = TrainingLoop(world, task, points(), *strategy, options).run();
    if (ended) ended(world.rank(), run);
  });
}

TEST(Callbacks, are_told_on_every_rank_of_each_step_epoch_and_checkpoint_once_and_in_order) {
  const TempFolder folder;
  TrainOptions options = small_options();
  options.checkpoint_dir = folder.path();
  options.checkpoint_every = 5;
  std::array<std::vector<std::string>, 2> steps, checkpoints, all;
  std::array<int64_t, 2> samples{};
  std::array<double, 2> loss{}, accuracy{};
  const auto add = [&](Task& task, int rank, torch::nn::Module& model) {
    task.on_step = [&, rank](const StepEvent& event, torch::nn::Module& its) {
      EXPECT_EQ(&its, &model);
      EXPECT_TRUE(std::isfinite(event.loss) && event.learning_rate > 0 && event.seconds > 0);
      samples[rank] += event.samples;
      steps[rank].push_back(concat(event.step, " in epoch ", event.epoch));
      all[rank].push_back(concat("step ", event.step));
    };
    task.on_epoch = [&, rank](const EpochEvent& event, torch::nn::Module&) {
      EXPECT_EQ(event.validation.samples, 31);
      EXPECT_TRUE(event.samples == 50 && event.learning_rate > 0 && event.seconds > 0);
      loss[rank] = event.loss;
      accuracy[rank] = event.validation.accuracy;
      steps[rank].push_back(concat("epoch ", event.epoch, " ends with ", event.step));
      all[rank].push_back(concat("epoch ", event.epoch));
    };
    task.on_checkpoint = [&, rank](const CheckpointEvent& event) {
      EXPECT_TRUE(std::filesystem::is_regular_file(event.path)) << event.path;
      checkpoints[rank].push_back(concat(event.step));
      all[rank].push_back(concat("checkpoint ", event.step));
    };
  };
  run_on_2(options, add, [&](int rank, const Json& run) {
    EXPECT_EQ(run["train_loss"], loss[rank]);
    EXPECT_EQ(run["val_accuracy"], accuracy[rank]);
  });
  std::vector<std::string> expected;
  for (int step = 0; step < 21; ++step) {
    expected.push_back(concat(step, " in epoch ", step / 7));
    if (step % 7 == 6) expected.push_back(concat("epoch ", step / 7, " ends with ", step));
  }
  EXPECT_EQ(steps[0], expected);
  EXPECT_EQ(samples[0], 150);
  EXPECT_EQ(checkpoints[0], (std::vector<std::string>{"5", "10", "15", "20", "21"}));
  EXPECT_EQ(all[0], all[1]) << "the ranks are not told between the same steps";
}

TEST(Callbacks, end_the_run_on_all_ranks_with_what_one_throws) {
  std::array<int, 2> steps{};
  const auto add = [&](Task& task, int rank, torch::nn::Module&) {
    task.on_step = [&, rank](const StepEvent& event, torch::nn::Module&) {
      ++steps[rank];
      if (rank == 1 && event.step == 3) throw DataError({.what = "thrown on purpose"});
    };
  };
  EXPECT_TRUE(contains(message_of<DataError>([&] { run_on_2(small_options(), add); }), "thrown on purpose"));
  EXPECT_EQ(steps[1], 4);
  EXPECT_LE(steps[0], 4);
}

// Samples of class 1 alone count. The rate is so low that the model stays what it was.
TEST(Callbacks, hear_of_means_over_what_the_task_counts) {
  TrainOptions options = small_options();
  options.epochs = 1;
  options.strategy.optimizer = SGDOptions{.lr = 1e-12};
  Task task = dropout_task();
  task.forward = [](torch::nn::Module& model, const torch::Tensor& data) {
    return dynamic_cast<torch::nn::LinearImpl&>(model).forward(data);
  };
  task.loss = [](const torch::Tensor& output, const torch::Tensor& target) {
    return torch::cross_entropy_loss(output, target, {}, at::Reduction::Mean, /*ignore_index=*/0);
  };
  task.samples = [](const Batch& batch) { return batch.target.sum().item<int64_t>(); };
  task.on_epoch = [](const EpochEvent& event, torch::nn::Module&) {
    EXPECT_EQ(event.samples, 50);
    EXPECT_LT(event.validation.samples, 50);
    EXPECT_NEAR(event.loss, event.validation.loss, 1e-5);
  };
  const Datasets twice{.train = std::make_shared<Points>(50), .validation = std::make_shared<Points>(50)};
  EXPECT_EQ(run_alone(options, twice, task).metrics["samples"], 50);
}

TEST(Callbacks, hear_of_shards_by_their_index) {
  const TempFolder folder;
  TrainOptions options = small_options();
  options.checkpoint_dir = folder.path();
  options.checkpoint_shard_bytes = 40;
  options.max_steps = 2;
  std::string path;
  Task task = dropout_task();
  task.on_checkpoint = [&](const CheckpointEvent& event) { path = event.path; };
  run_alone(options, points(), task);
  EXPECT_EQ(path, folder.file("step-00000002.safetensors.index.json"));
}

TEST(Callbacks, stay_when_a_task_is_fitted_to_the_data) {
  Task task = model_task("lenet");
  task.on_step = [](const StepEvent&, torch::nn::Module&) {};
  SampleShape sample = task.sample;
  sample.classes = 5;
  EXPECT_TRUE(fitted_as(task, sample).on_step);
}

TEST(ShareCheckpoint, gives_all_ranks_what_rank_0_has_found) {
  const TempFolder folder;
  const TensorFile state = {.tensors = {{"a", torch::arange(1000, torch::kFloat32)},
                                        {"empty", torch::empty({0, 3})},
                                        {"small", torch::ones({3}).to(torch::kFloat8_e5m2)},
                                        {"unsigned", torch::tensor(7).to(torch::kUInt16)}},
                            .metadata = {{"step", "1"}}};
  CheckpointFolder checkpoints(folder.path());
  checkpoints.save(1, state);
  run_ranks(3, [&](World& world) {
    EXPECT_FALSE(share_checkpoint(world, std::nullopt));
    const auto saved = share_checkpoint(world, world.rank() == 0 ? checkpoints.load_newest() : std::nullopt);
    ASSERT_TRUE(saved);
    EXPECT_EQ(saved->metadata, state.metadata);
    EXPECT_TRUE(torch::equal(saved->read("a"), state.tensors.at("a")));
    EXPECT_EQ(saved->read("empty").sizes(), torch::IntArrayRef({0, 3}));
    EXPECT_TRUE(torch::equal(saved->read("small").to(torch::kFloat32), torch::ones({3})));
    EXPECT_EQ(saved->read("unsigned").to(torch::kInt64).item<int>(), 7);
  });
}

TEST(Accumulating, takes_the_steps_of_a_batch_that_is_as_large_as_all_parts) {
  Task task = dropout_task();
  task.forward = [](torch::nn::Module& model, const torch::Tensor& data) {
    return dynamic_cast<torch::nn::LinearImpl&>(model).forward(data);
  };
  TrainOptions options = small_options();
  options.learning_rate.scaling = LrScaling::kLinear;
  options.loader.batch_size = 12;
  const Outcome whole = run_alone(options, points(), task);
  options.loader.batch_size = 4;
  options.strategy.accumulate = 3;
  const Outcome parts = run_alone(options, points(), task);
  EXPECT_EQ(parts.metrics["steps"], whole.metrics["steps"]);
  EXPECT_EQ(parts.metrics["samples"], whole.metrics["samples"]);
  EXPECT_NEAR(parts.metrics["train_loss"], whole.metrics["train_loss"], 1e-5);
  for (size_t i = 0; i < whole.parameters.size(); ++i)
    EXPECT_TRUE(torch::allclose(parts.parameters[i], whole.parameters[i], 1e-4, 1e-5));
}

TEST(LabelSmoothing, gives_all_classes_a_share_of_each_target) {
  const torch::Tensor output = torch::randn({5, 10}), target = torch::arange(5), logs = output.log_softmax(1);
  const torch::Tensor expected = -0.9 * logs.gather(1, target.unsqueeze(1)).mean() - 0.1 * logs.mean();
  EXPECT_TRUE(torch::allclose(smoothed(model_task("lenet"), 0.1).loss(output, target), expected));
  const Task gpt = smoothed(model_task("gpt-mini"), 0.1);
  EXPECT_TRUE(torch::allclose(gpt.loss(output.view({1, 5, 10}), target.view({1, 5})), expected));
}

TEST(LabelSmoothing, is_refused_for_another_loss) {
  EXPECT_TRUE(contains(message_of<UsageError>([] { smoothed(dropout_task(), 0.1); }), "--label-smoothing with points"));
  EXPECT_NO_THROW(smoothed(dropout_task(), 0));
}

TEST(Evaluate, gives_the_same_exact_result_for_any_number_of_ranks) {
  std::vector<Evaluation> found;
  std::mutex mutex;
  for (const int ranks : {1, 2, 3, 4, 7}) {
    run_ranks(ranks, [&](World& world) {
      const auto strategy = make_strategy(world, dropout_task(), {.seed = 3});
      const Evaluation mine =
          evaluate(world, dropout_task(), *strategy, std::make_shared<Points>(101), {.batch_size = 8});
      EXPECT_TRUE(strategy->model().is_training());
      strategy->model().eval();
      const Evaluation of_model =
          evaluate(world, dropout_task(), strategy->model(), std::make_shared<Points>(101), {.batch_size = 5});
      EXPECT_FALSE(strategy->model().is_training());
      const std::lock_guard lock(mutex);
      found.push_back(mine);
      found.push_back(of_model);
    });
  }
  for (const Evaluation& each : found) {
    EXPECT_EQ(each.samples, 101);
    EXPECT_EQ(each.accuracy, found[0].accuracy);
    EXPECT_NEAR(each.loss, found[0].loss, 1e-6);
  }
}

}  // namespace
}  // namespace lockstep
