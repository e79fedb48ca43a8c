// SPDX-License-Identifier: Apache-2.0
#include "lockstep/train/choose_strategy.h"

#include <optional>

#include "lockstep/base/log.h"
#include "lockstep/base/text.h"
#include "lockstep/collective/gpus.h"
#include "lockstep/error.h"
#include "lockstep/train/builtin.h"
#include "lockstep/train/options/ranks_and_devices.h"
#include "tools/plan/auto.h"

namespace lockstep {
namespace {

// The reason why no other strategy can do what was asked for.
std::optional<std::string> why_ddp(const TrainOptions& options) {
  if (options.max_restarts > 0 || options.min_ranks > 0) return "lost ranks are to be replaced, so ranks are processes";
  if (options.strategy.precision == Precision::kFloat16) return "not every strategy has --precision float16";
  if (options.strategy.ddp.virtual_shards > 0) return "--virtual-shards is an option of ddp";
  if (options.strategy.accumulate > 1 || !options.strategy.no_decay.empty())
    return "not every strategy has --accumulate and --no-decay";
  if (!options.strategy.ddp.share_parameters) return "--separate-parameters is an option of ddp";
  if (options.strategy.compression.kind != Compression::kNone)
    return "--compression goes between ranks that are processes";
  return {};
}

void say(const std::string& text) { log_info(concat("--strategy auto is ", text)); }

}  // namespace

void choose_strategy(TrainOptions& options, const Task& task) {
  if (options.launcher != "none")
    throw UsageError({.what = concat("--strategy auto in ranks that ", options.launcher, " has started"),
                      .likely = "it measures on a whole machine before there are ranks",
                      .next = "ask lockstep plan, and give --strategy what it recommends"});
  options.strategy.kind = StrategyKind::kDdp;
  const int devices = ranks_to_start(options);
  if (devices == 1) {
    options.strategy.kind = StrategyKind::kSingle;
    return say("single: there is one device");
  }
  if (const auto why = why_ddp(options)) return say(concat("ddp: ", *why));
  const auto wanted = wanted_kind(options);  // unless told: GPUs if there are enough
  if (wanted ? *wanted == torch::kCUDA : cuda_device_count_before_fork() >= devices)
    throw UsageError({.what = "--strategy auto with GPUs, of which it has no measurements",
                      .next = "choose a --strategy (ddp suits nearly always), or train on cores: --device cpu"});
  require_batch_for_ranks(options.loader.batch_size, devices);
  log_info(concat("--strategy auto measures ", task.name, " on this machine, 20 to 30 s"));
  plan::Subject subject{.task = fitted_before_fork(task, options.source, options.classes),
                        .strategy = options.strategy,
                        .batch = options.loader.batch_size,
                        .data = [&] { return load_datasets(options.source, task); }};
  const bool names_cores = options.devices != "auto" && options.devices != "cpu";  // of each device
  say(plan::choose_strategy(subject, devices, !names_cores));
  options.strategy = subject.strategy;
  if (options.strategy.kind != StrategyKind::kSingle) return;
  options.ranks = "1";  // which has the cores of all
  options.threads = options.threads > 0 ? options.threads * devices : allotted_cores();
}

}  // namespace lockstep
