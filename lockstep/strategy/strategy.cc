#include "lockstep/strategy.h"

#include "lockstep/base/text.h"
#include "lockstep/error.h"
#include "lockstep/model/mixed_precision.h"
#include "lockstep/strategy/averaging/averaging.h"
#include "lockstep/strategy/ddp/ddp_strategy.h"
#include "lockstep/strategy/devices/data_parallel.h"
#include "lockstep/strategy/kvstore/kvstore_strategy.h"
#include "lockstep/strategy/pipeline/pipeline.h"
#include "lockstep/towers.h"

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

constexpr Entry kEntries[] = {
    {{"single", "one device, nothing to exchange"}, make_single},
    {{"ddp", "gradients exchanged after or during backward"}, make_ddp},
    {{"towers", "gradients combined in steps; --algorithm, --update", true}, make_towers},
    {{"data_parallel", "outputs, loss and gradients meet on device 0", true}, make_data_parallel},
    {{"kvstore", "a store on servers, in step or not; --kvstore", true}, make_kvstore_strategy},
    {{"averaging", "nets of their own, averaged; --average-every", true}, make_averaging},
    {{"pipeline", "layers on different devices; --stages", true}, make_pipeline},
};

const Entry& entry_of(const std::string& name) {
  std::vector<std::string> names;
  for (const Entry& entry : kEntries) {
    if (name == entry.info.name) return entry;
    names.emplace_back(entry.info.name);
  }
  throw UsageError({.what = concat("no such strategy: ", name), .next = concat("one of ", join(names, ", "))});
}

Task in_precision(const Task& task, const StrategyOptions& options) {
  if (options.precision == "float32") return task;
  if (options.precision != "bfloat16")
    throw UsageError({.what = concat("no such precision: ", options.precision), .next = "float32 or bfloat16"});
  if (options.name == "pipeline")
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

const StrategyInfo& strategy_info(const std::string& name) { return entry_of(name).info; }

std::unique_ptr<Strategy> make_strategy(const World& world, const Task& task, const StrategyOptions& options) {
  return entry_of(options.name).make(world, in_precision(task, options), options);
}

}  // namespace lockstep
