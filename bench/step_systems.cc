// SPDX-License-Identifier: Apache-2.0
#include "bench/step_systems.h"

#include <unistd.h>

#include <cstring>
#include <functional>

#include <ATen/Parallel.h>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>
#include <torch/types.h>

#include "agent/start/launcher.h"
#include "bench/harness.h"
#include "bench/limits.h"
#include "bench/processes.h"
#include "lockstep/base/files/file.h"
#include "lockstep/base/text.h"
#include "lockstep/collective/gpus.h"
#include "lockstep/deadline.h"
#include "lockstep/memory.h"
#include "lockstep/models.h"
#include "lockstep/sampler.h"
#include "lockstep/strategy.h"
#include "lockstep/strategy/option_names.h"
#include "tools/plan/measured_steps.h"

namespace lockstep::bench {
namespace {

constexpr int64_t kTokens = 128;
constexpr int64_t kVocabulary = 256;

// Dense layers with tanh between them, as small as the policies of reinforcement learning.
struct PolicyImpl : torch::nn::SequentialImpl {
  PolicyImpl() {
    push_back(torch::nn::Linear(8, 64));
    push_back(torch::nn::Tanh());
    push_back(torch::nn::Linear(64, 64));
    push_back(torch::nn::Tanh());
    push_back(torch::nn::Linear(64, 4));
  }
  torch::Tensor forward(const torch::Tensor& x) { return torch::nn::SequentialImpl::forward(x); }
};
TORCH_MODULE(Policy);

Task task_of(const StepCase& one) {
  if (one.name == "policy") return classification_task<Policy>("policy");
  if (one.name == "mlp")
    return classification_task<MLP>("mlp", MLPOptions{.inputs = 1024, .hidden = {4096, 4096}, .outputs = 1000});
  if (one.name == "gpt")
    return gpt_task(
        "gpt", {.vocabulary = kVocabulary, .context = kTokens, .layers = 6, .heads = 6, .width = 384, .dropout = 0});
  return model_task(one.name);
}

// Random samples of the right shape: the time of a step does not depend on what they show.
Batch random_batch(const StepCase& one, int64_t size) {
  torch::manual_seed(1);
  if (one.name == "gpt")
    return {torch::randint(kVocabulary, {size, kTokens}, torch::kInt64),
            torch::randint(kVocabulary, {size, kTokens}, torch::kInt64)};
  std::vector<int64_t> shape{size, 3, 32, 32};
  if (one.name == "lenet") shape = {size, 1, 28, 28};
  if (one.name == "policy") shape = {size, 8};
  if (one.name == "mlp") shape = {size, 1024};
  if (one.name == "alexnet") shape = {size, 3, 224, 224};
  const int64_t classes = one.name == "mlp" || one.name == "alexnet" ? 1000 : one.name == "policy" ? 4 : 10;
  return {torch::randn(shape), torch::randint(classes, {size}, torch::kInt64)};
}

constexpr size_t kCopied = size_t{64} << 20;
constexpr int kRepeats = 5;

double pss_mib() { return pss_bytes(::getpid()) / (1 << 20); }

// Memory taken of the device; of a GPU also by other programs.
double taken_mib(torch::Device device) {
  if (device.is_cpu()) return pss_mib();
  const auto [free, all] = memory_of(device);
  return static_cast<double>(all - free) / (1 << 20);
}

// How much all ranks together do in a second when each does `amount` by calling work().
double speed(const World& world, double amount, const std::function<void()>& work) {
  std::vector<double> seconds;
  for (int i = 0; i < kRepeats; ++i) {
    world.barrier();
    const Stopwatch watch;
    work();
    wait_for_device(world.device());
    seconds.push_back(plan::largest_of(world, watch.seconds()));
  }
  return amount * world.size() / median(seconds);
}

// Bytes that all ranks together read and write while each copies memory.
double copy_speed(const World& world) {
  const auto options = torch::TensorOptions(torch::kUInt8).device(world.device());
  const torch::Tensor from = torch::ones({kCopied}, options), to = torch::ones({kCopied}, options);
  return speed(world, 2.0 * kCopied, [&] {
    if (to.is_cpu())
      std::memcpy(to.mutable_data_ptr(), from.const_data_ptr(), kCopied);
    else
      to.copy_(from);
  });
}

// The steps of one rank, phase by phase.
class RankTraining {
 public:
  RankTraining(const World& world, const StepCase& one, const StepRun& run)
      : world_(world), strategy_(make(world, one, run)), batch_(own_part(world, one)) {
    batch_.data = in_layout(batch_.data, one.layout == "channels_last" ? Layout::kChannelsLast : Layout::kContiguous);
    batch_ = {batch_.data.to(world.device()), batch_.target.to(world.device())};
  }

  void step() {
    const PhaseTimes before = strategy_->phases();
    const Stopwatch watch;
    strategy_->forward_backward(batch_);
    strategy_->update();
    wait_for_device(world_.device());
    const PhaseTimes& after = strategy_->phases();
    keep("step", watch.seconds());
    keep("forward", after.forward - before.forward);
    keep("backward", after.backward - before.backward);
    keep("wait", after.exchange - before.exchange);
    keep("update", after.update - before.update);
  }

  void forget() { seconds_.clear(); }

  double operations_of_step() {
    const OperationCount count;
    step();
    return count.operations();
  }

  // A step takes as long as on the slowest rank; who arrives last does not wait.
  Seconds medians() const {
    Seconds result;
    for (const auto& [name, values] : seconds_) {
      const double sign = name == "wait" ? -1 : 1;
      result[name] = sign * plan::largest_of(world_, sign * median(values));
    }
    return result;
  }

  double parameter_mib() const {
    double bytes = 0;
    for (const torch::Tensor& parameter : strategy_->model().parameters())
      bytes += static_cast<double>(parameter.nbytes());
    return bytes / (1 << 20);
  }

 private:
  static std::unique_ptr<Strategy> make(const World& world, const StepCase& one, const StepRun& run) {
    return make_strategy(world, task_of(one),
                         {.optimizer = SGDOptions{.lr = 1e-3, .momentum = 0.9},
                          .seed = 1,
                          .layout = value_named<std::optional<Layout>>(one.layout, "--layout"),
                          .ddp = {.share_parameters = run.share_parameters, .virtual_shards = run.virtual_shards}});
  }

  static Batch own_part(const World& world, const StepCase& one) {
    const Range mine = even_part(one.batch, world.rank(), world.size());
    return random_batch(one, mine.end - mine.begin);
  }

  void keep(const std::string& name, double seconds) { seconds_[name].push_back(seconds); }

  World world_;
  std::unique_ptr<Strategy> strategy_;
  Batch batch_;
  std::map<std::string, std::vector<double>> seconds_;
};

Seconds train(const World& world, const StepCase& one, const StepRun& run) {
  const double idle = plan::sum_of(world, taken_mib(world.device()));
  RankTraining training(world, one, run);
  const double operations = plan::sum_of(world, training.operations_of_step());
  for (int i = 0; i < run.warmup; ++i) training.step();
  training.forget();
  for (int i = 0; i < run.steps; ++i) training.step();
  Seconds result = training.medians();
  result["idle_mib"] = idle;
  result["memory_mib"] = plan::sum_of(world, taken_mib(world.device()));
  result["parameter_mib"] = training.parameter_mib();
  result["copy"] = copy_speed(world);
  if (!world.device().is_cpu()) return result;
  result["operations"] = operations;
  result["triad"] = speed(world, Triad::kAmount, Triad());
  result["sgemm"] = speed(world, Sgemm::kAmount, Sgemm());
  return result;
}

}  // namespace

const std::vector<StepCase>& step_cases() {
  static const std::vector<StepCase> cases{
      {"lenet", 256, "channels_last"},       // 0.13 M parameters
      {"policy", 128, "contiguous"},         // 0.005 M
      {"mlp", 32, "contiguous"},             // 25.1 M
      {"alexnet", 8, "channels_last"},       // 61.1 M
      {"resnet18-32", 64, "channels_last"},  // 11.2 M
      {"gpt", 8, "contiguous"},              // 10.8 M
  };
  return cases;
}

Seconds run_lockstep_step(const StepCase& one, const StepRun& run) {
  const TemporaryFolder folder;
  const std::string results = folder.file("results");
  const auto rank = [&] {
    keep_freed_memory();
    at::set_num_threads(run.threads);
    const World world = World::from_env({.device = torch::Device(run.device).type()});
    const Seconds seconds = train(world, one, run);
    if (world.rank() == 0) write_file(results, Json(seconds).dump());
    return 0;
  };
  const LaunchResult ended = launch({.ranks = run.ranks, .first_is_plain = true}, rank);
  if (ended.exit_code != 0)
    throw SystemError(
        {.what = concat("a rank of lockstep ended with code ", ended.exit_code), .likely = "its own message is above"});
  return Json::parse(read_file(results)).get<Seconds>();
}

Seconds run_pytorch_step(const StepCase& one, const StepRun& run, int ranks, const std::string& layout) {
  return Json::parse(run_python("peers/step.py", {one.name, concat(ranks), concat(one.batch), layout,
                                                  concat(run.warmup), concat(run.steps), run.device}))
      .get<Seconds>();
}

double least_measured(const std::vector<double>& all) {
  double least = 0;
  for (const double seconds : all)
    if (seconds > 0 && (least == 0 || seconds < least)) least = seconds;
  return least;
}

}  // namespace lockstep::bench
