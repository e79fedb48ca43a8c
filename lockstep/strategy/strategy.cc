// SPDX-License-Identifier: Apache-2.0
#include "lockstep/strategy.h"

#include "lockstep/base/text.h"
#include "lockstep/error.h"
#include "lockstep/model/mixed_precision.h"
#include "lockstep/strategy/averaging/averaging.h"
#include "lockstep/strategy/ddp/ddp_strategy.h"
#include "lockstep/strategy/devices/data_parallel.h"
#include "lockstep/strategy/devices/towers_strategy.h"
#include "lockstep/strategy/kvstore/kvstore_strategy.h"
#include "lockstep/strategy/pipeline/pipeline.h"

namespace lockstep {
namespace {

std::unique_ptr<Strategy> make_single(const World& world, const Task& task, const StrategyOptions& options) {
  if (world.size() == 1) return make_ddp(world, task, options);
  throw UsageError({.what = concat("strategy single trains on one rank, but there are ", world.size()),
                    .next = "leave out --ranks, or choose --strategy ddp"});
}

struct Entry {
  StrategyInfo info;
  std::unique_ptr<Strategy> (*make)(const World&, const Task&, const StrategyOptions&);
};

// Every strategy, once: the command line, its help, the metrics and make_strategy() read this table.
constexpr Entry kEntries[] = {
    {{StrategyKind::kSingle, "single", "one device, nothing to exchange"}, make_single},
    {{StrategyKind::kDdp, "ddp", "gradients exchanged after or during backward"}, make_ddp},
    {{StrategyKind::kTowers, "towers", "gradients combined in steps; --algorithm, --update", true}, make_towers},
    {{StrategyKind::kDataParallel, "data_parallel", "outputs, loss and gradients meet on device 0", true},
     make_data_parallel},
    {{StrategyKind::kKVStore, "kvstore", "a store on servers, in step or not; --kvstore", true}, make_kvstore_strategy},
    {{StrategyKind::kAveraging, "averaging", "separate replicas, averaged; --average-every", true}, make_averaging},
    {{StrategyKind::kPipeline, "pipeline", "layers on different devices; --stages", true}, make_pipeline},
};

const Entry& entry_of(StrategyKind kind) {
  for (const Entry& entry : kEntries)
    if (entry.info.kind == kind) return entry;
  throw UsageError({.what = "StrategyOptions::kind is no strategy", .next = "take one of StrategyKind"});
}

Task in_precision(const Task& task, const StrategyOptions& options) {
  if (options.precision == Precision::kFloat32) return task;
  if (options.kind == StrategyKind::kPipeline)
    throw UsageError(
        {.what = "strategy pipeline runs the pieces of a model, which compute in the precision of their parameters",
         .next = "leave precision float32, or choose another strategy"});
  return in_mixed_precision(task);
}

}  // namespace

const std::vector<StrategyInfo>& strategies() {
  static const std::vector<StrategyInfo> kInfos = [] {
    std::vector<StrategyInfo> infos;
    for (const Entry& entry : kEntries) infos.push_back(entry.info);
    return infos;
  }();
  return kInfos;
}

const StrategyInfo& strategy_info(StrategyKind kind) { return entry_of(kind).info; }

std::unique_ptr<Strategy> make_strategy(const World& world, const Task& task, const StrategyOptions& options) {
  return entry_of(options.kind).make(world, in_precision(task, options), options);
}

}  // namespace lockstep
