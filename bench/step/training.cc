// SPDX-License-Identifier: Apache-2.0
#include "bench/step/training.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cstring>
#include <fstream>
#include <sstream>

#include <ATen/Parallel.h>

#include "bench/harness.h"
#include "bench/processes.h"
#include "lockstep/base/file.h"
#include "lockstep/base/text.h"
#include "lockstep/base/unique_fd.h"
#include "lockstep/deadline.h"
#include "lockstep/error.h"
#include "lockstep/launch/launcher.h"
#include "lockstep/layout.h"
#include "lockstep/memory.h"
#include "lockstep/sampler.h"
#include "lockstep/strategy.h"
#include "lockstep/strategy/option_names.h"

namespace lockstep::bench {
namespace {

constexpr std::size_t kCopied = std::size_t{64} << 20;
constexpr int kCopies = 5;

double pss_mib() {
  std::ifstream file("/proc/self/smaps_rollup");
  for (std::string line; std::getline(file, line);)
    if (line.starts_with("Pss:")) return std::stod(line.substr(4)) / 1024;
  return 0;
}

double reduced(const World& world, double value, ReduceOp op) {
  const torch::Tensor tensor = torch::full({}, value, torch::kFloat64);
  world.all_reduce(tensor, op);
  return tensor.item<double>();
}

// Bytes per second that all ranks together read and write while each copies memory: what the machine can do at best.
double copy_speed(const World& world) {
  const torch::Tensor from = torch::ones({kCopied}, torch::kUInt8);
  const torch::Tensor to = torch::ones({kCopied}, torch::kUInt8);
  std::vector<double> seconds;
  for (int i = 0; i < kCopies; ++i) {
    world.barrier();
    const Stopwatch watch;
    std::memcpy(to.mutable_data_ptr(), from.const_data_ptr(), kCopied);
    seconds.push_back(reduced(world, watch.seconds(), ReduceOp::kMax));
  }
  return 2.0 * kCopied * world.size() / median(seconds);
}

// The steps of one rank, phase by phase.
class RankTraining {
 public:
  RankTraining(const World& world, const StepCase& one, const StepRun& run)
      : world_(world), strategy_(make(world, one, run)), batch_(own_part(world, one)) {
    batch_.data = in_layout(batch_.data, one.layout == "channels_last" ? Layout::kChannelsLast : Layout::kContiguous);
  }

  void step() {
    const PhaseTimes before = strategy_->phases();
    const Stopwatch watch;
    strategy_->forward_backward(batch_);
    strategy_->update();
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
    for (const auto& [name, values] : seconds_)
      result[name] = reduced(world_, median(values), name == "wait" ? ReduceOp::kMin : ReduceOp::kMax);
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
  const double idle = reduced(world, pss_mib(), ReduceOp::kSum);
  RankTraining training(world, one, run);
  for (int i = 0; i < run.warmup; ++i) training.step();
  training.forget();
  for (int i = 0; i < run.steps; ++i) training.step();
  Seconds result = training.medians();
  result["idle_mib"] = idle;
  result["memory_mib"] = reduced(world, pss_mib(), ReduceOp::kSum);
  result["parameter_mib"] = training.parameter_mib();
  result["copy"] = copy_speed(world);
  return result;
}

// Lines of a name and a number.
Seconds parse_lines(const std::string& text) {
  std::istringstream lines(text);
  Seconds seconds;
  std::string name;
  for (double value = 0; lines >> name >> value;) seconds[name] = value;
  return seconds;
}

}  // namespace

Seconds run_lockstep_step(const StepCase& one, const StepRun& run) {
  const UniqueFd results(::memfd_create("results", 0));
  if (!results) throw system_error("make", "a file for results");
  const auto rank = [&] {
    keep_freed_memory();
    at::set_num_threads(1);
    const World world = World::from_env();
    const Seconds seconds = train(world, one, run);
    std::ostringstream text;
    for (const auto& [name, value] : seconds) text << name << ' ' << value << '\n';
    if (world.rank() == 0 && ::write(results.get(), text.str().data(), text.str().size()) < 0)
      throw system_error("write", "the results");
    return 0;
  };
  const LaunchResult ended = launch({.ranks = run.ranks, .output = RankOutput::kFirst}, rank);
  if (ended.exit_code != 0)
    throw SystemError(
        {.what = concat("a rank of lockstep ended with code ", ended.exit_code), .likely = "its own message is above"});
  return parse_lines(read_file(concat("/proc/self/fd/", results.get())));
}

Seconds run_pytorch_step(const StepCase& one, const StepRun& run) {
  return parse_lines(run_python("step-pytorch.py", {one.name, concat(run.ranks), concat(one.batch), one.layout,
                                                    concat(run.warmup), concat(run.steps)}));
}

}  // namespace lockstep::bench
