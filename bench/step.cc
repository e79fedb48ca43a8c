// SPDX-License-Identifier: Apache-2.0
// `lockstep bench step`: a data-parallel training step beside PyTorch's DistributedDataParallel, in turn: on cores over Gloo, or
// with a GPU for each rank over NCCL. On cores also beside PyTorch in one process that has all of them.
#include <unistd.h>

#include <cstring>
#include <initializer_list>
#include <iostream>
#include <set>

#include <ATen/Parallel.h>
#include <torch/types.h>

#include "agent/clusters/environment.h"
#include "agent/start/launcher.h"
#include "bench/harness.h"
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

// ---- the training steps that are compared: five models, from small to heavy in parameters

struct StepCase {
  std::string name;    // bench/peers/step.py knows it too
  int64_t batch;       // global
  std::string layout;  // of both systems: contiguous | channels_last
};

constexpr int64_t kTokens = 128;
constexpr int64_t kVocabulary = 256;

const std::vector<StepCase>& step_cases() {
  static const std::vector<StepCase> cases{
      {"lenet", 256, "channels_last"},       // 0.13 M parameters
      {"mlp", 32, "contiguous"},             // 25.1 M
      {"alexnet", 8, "channels_last"},       // 61.1 M
      {"resnet18-32", 64, "channels_last"},  // 11.2 M
      {"gpt", 8, "contiguous"},              // 10.8 M
  };
  return cases;
}

Task task_of(const StepCase& one) {
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
  if (one.name == "mlp") shape = {size, 1024};
  if (one.name == "alexnet") shape = {size, 3, 224, 224};
  const int64_t classes = one.name == "mlp" || one.name == "alexnet" ? 1000 : 10;
  return {torch::randn(shape), torch::randint(classes, {size}, torch::kInt64)};
}

// ---- the systems, each run as processes of this machine

using Seconds = std::map<std::string, double>;  // by name

struct StepRun {
  int ranks = 2;
  int threads = 1;  // of each rank
  int warmup = 2;
  int steps = 10;
  bool share_parameters = true;
  int virtual_shards = 0;
  std::string device = "cpu";  // or "cuda": a GPU for each rank
};

constexpr size_t kCopied = size_t{64} << 20;
constexpr int kCopies = 5;

double pss_mib() { return pss_bytes(::getpid()) / (1 << 20); }

// What is taken of the device; of a GPU also by other programs.
double taken_mib(torch::Device device) {
  if (device.is_cpu()) return pss_mib();
  const GpuMemory memory = memory_of(device);
  return static_cast<double>(memory.all - memory.free) / (1 << 20);
}

// Bytes per second that all ranks together read and write while each copies memory: what the machine can do at best.
double copy_speed(const World& world) {
  const auto options = torch::TensorOptions(torch::kUInt8).device(world.device());
  const torch::Tensor from = torch::ones({kCopied}, options), to = torch::ones({kCopied}, options);
  std::vector<double> seconds;
  for (int i = 0; i < kCopies; ++i) {
    world.barrier();
    const Stopwatch watch;
    if (to.is_cpu())
      std::memcpy(to.mutable_data_ptr(), from.const_data_ptr(), kCopied);
    else
      to.copy_(from);
    wait_for_device(world.device());
    seconds.push_back(plan::largest_of(world, watch.seconds()));
  }
  return 2.0 * kCopied * world.size() / median(seconds);
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
  for (int i = 0; i < run.warmup; ++i) training.step();
  training.forget();
  for (int i = 0; i < run.steps; ++i) training.step();
  Seconds result = training.medians();
  result["idle_mib"] = idle;
  result["memory_mib"] = plan::sum_of(world, taken_mib(world.device()));
  result["parameter_mib"] = training.parameter_mib();
  result["copy"] = copy_speed(world);
  return result;
}

// Medians in seconds: step, forward, backward, wait (for the last rank to arrive), update; copy (bytes per second that
// all ranks together read and write in memcpy); idle_mib and memory_mib, sums over the ranks; parameter_mib.
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

// The median of one process with a thread for each core, on the whole batch.
double run_lockstep_alone(const StepCase& one, StepRun run) {
  run.ranks = 1;
  run.threads = allotted_cores();
  return run_lockstep_step(one, run)["step"];
}

// ddp, no_sync: medians in seconds; idle_mib and memory_mib. With 0 ranks one_process_LAYOUT and one_process_LAYOUT_kept: medians of
// one process, the second one with a malloc that keeps freed memory.
Seconds run_pytorch_step(const StepCase& one, const StepRun& run, int ranks, const std::string& layout) {
  return Json::parse(run_python("peers/step.py", {one.name, concat(ranks), concat(one.batch), layout,
                                                  concat(run.warmup), concat(run.steps), run.device}))
      .get<Seconds>();
}

// ---- the comparison

// 0: none was measured.
double least_measured(std::initializer_list<double> all) {
  double least = 0;
  for (const double seconds : all)
    if (seconds > 0 && (least == 0 || seconds < least)) least = seconds;
  return least;
}

struct Compared {
  StepCase one;
  Figures ours{};
  Figures theirs{};

  double one_process() const {
    return least_measured({theirs["one_process_contiguous"], theirs["one_process_channels_last"]});
  }
  double one_process_kept() const {
    return least_measured({theirs["one_process_contiguous_kept"], theirs["one_process_channels_last_kept"]});
  }
  double best_alternative() const { return least_measured({theirs["ddp"], one_process(), one_process_kept()}); }
  double best() const { return least_measured({ours["step"], ours["one_process"]}); }
};

Compared compare(const Program& program, const StepCase& one, const StepRun& run, bool with_pytorch) {
  Compared compared{.one = one};
  program.take_turns(one.name, [&](int) {
    Seconds mine = run_lockstep_step(one, run);
    if (run.device == "cpu") mine["one_process"] = run_lockstep_alone(one, run);
    compared.ours.add(mine);
    if (!with_pytorch) return;
    compared.theirs.add(run_pytorch_step(one, run, run.ranks, one.layout));
    if (run.device != "cpu") return;
    for (const std::string& layout : std::set<std::string>{"contiguous", one.layout})
      compared.theirs.add(run_pytorch_step(one, run, /*ranks=*/0, layout));
  });
  return compared;
}

std::string milliseconds_of(double seconds) { return seconds > 0 ? milliseconds(seconds) : "-"; }
std::string times_of(double theirs, double ours) { return theirs > 0 ? times(theirs / ours) : "-"; }

// SGD with momentum over p ranks reads p gradients, the momentum and the parameters once, and writes the latter two.
double limit_seconds(const Figures& ours, int ranks) {
  return (ranks + 4) * ours["parameter_mib"] * (1 << 20) / ours["copy"];
}

void print(const std::vector<Compared>& all, const StepRun& run, int turns) {
  Table steps({"model", "batch", "MiB", "lockstep ms", "one process ms", "DDP ms", "no_sync ms", "one process ms",
               "keeping memory ms", "DDP/ours", "best alternative/best of ours"});
  Table phases({"model", "forward", "backward", "wait", "update ms", "limit ms", "update at", "update+wait at"});
  Table memory({"model", "lockstep MiB", "above idle", "DDP MiB", "above idle", "saved"});
  for (const Compared& each : all) {
    const auto& [one, ours, theirs] = each;
    steps.add({one.name, concat(one.batch), fixed(ours["parameter_mib"], 1), milliseconds(ours["step"]),
               milliseconds_of(ours["one_process"]), milliseconds_of(theirs["ddp"]), milliseconds_of(theirs["no_sync"]),
               milliseconds_of(each.one_process()), milliseconds_of(each.one_process_kept()),
               times_of(theirs["ddp"], ours["step"]), times_of(each.best_alternative(), each.best())});
    const double limit = limit_seconds(ours, run.ranks);
    phases.add({one.name, milliseconds(ours["forward"]), milliseconds(ours["backward"]), milliseconds(ours["wait"]),
                milliseconds(ours["update"]), milliseconds(limit), percent(limit / ours["update"]),
                percent(limit / (ours["update"] + ours["wait"]))});
    memory.add({one.name, fixed(ours["memory_mib"], 0), fixed(ours["memory_mib"] - ours["idle_mib"], 0),
                fixed(theirs["memory_mib"], 0), fixed(theirs["memory_mib"] - theirs["idle_mib"], 0),
                theirs["memory_mib"] > 0 ? percent(1 - ours["memory_mib"] / theirs["memory_mib"]) : "-"});
  }
  std::cout << "A step, SGD with momentum, " << run.ranks
            << (run.device == "cpu" ? " ranks x 1 thread" : " ranks with a GPU each") << "; medians of " << run.steps
            << " steps, then of " << turns << " turns\n"
            << machine() << "\n\n";
  steps.print(std::cout);
  std::cout << "one process: all cores, the whole batch; first lockstep's, then PyTorch's with fused SGD in the faster "
               "memory order, also "
               "with\na malloc that keeps freed memory. The best alternative is PyTorch's fastest\n";
  std::cout << "\nWhere lockstep's step goes. limit: the bytes that must move, at the speed of all ranks' memcpy\n";
  phases.print(std::cout);
  std::cout << "\nMemory: the sum over the ranks of PSS, or of what is taken of each GPU\n";
  memory.print(std::cout);
}

Json to_json(const std::vector<Compared>& all, const StepRun& run, int turns) {
  Json json{{"device", run.device}, {"ranks", run.ranks}, {"turns", turns}, {"steps", run.steps}};
  for (const Compared& each : all) {
    Json& model = json["models"][each.one.name];
    model = {{"lockstep", each.ours.medians()},
             {"pytorch", each.theirs.medians()},
             {"ranges", {{"lockstep", each.ours.ranges()}, {"pytorch", each.theirs.ranges()}}}};
    if (each.best_alternative() > 0) model["speed_up_over_best"] = each.best_alternative() / each.best();
  }
  return json;
}

}  // namespace

int bench_step(int argc, const char* const* argv) {
  std::vector<std::string> models;
  StepRun run;
  bool separate = false;
  Program program(
      "step", "A data-parallel training step beside PyTorch's DistributedDataParallel and one process, in turn.", 3);
  program.list("--models", models, "which of them; all by default")->check(CLI::IsMember(names_of(step_cases())));
  program.option("--ranks", run.ranks, "ranks of one thread each")->check(CLI::Range(1, 64));
  program.option("--steps", run.steps, "steps per turn")->check(CLI::Range(1, 10000));
  program.option("--device", run.device, "cpu, or cuda: a GPU for each rank; the peer exchanges over NCCL")
      ->check(CLI::IsMember(std::vector<std::string>{"cpu", "cuda"}));
  program.flag("--separate-parameters", separate, "lockstep with share_parameters = false: buckets and private copies");
  program.option("--virtual-shards", run.virtual_shards, "lockstep with these; 0: none");
  return program.run(argc, argv, [&] {
    run.share_parameters = !separate;
    const std::string missing = why_no_python("torch, torchvision");
    if (!missing.empty()) std::cout << "PyTorch is not measured: " << missing << "\n";
    std::vector<Compared> all;
    for (const StepCase& one : chosen(step_cases(), models)) all.push_back(compare(program, one, run, missing.empty()));
    print(all, run, program.turns());
    program.save(to_json(all, run, program.turns()));
  });
}

}  // namespace lockstep::bench
