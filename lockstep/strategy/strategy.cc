#include "lockstep/strategy/strategy.h"

#include "lockstep/base/error.h"
#include "lockstep/base/text.h"
#include "lockstep/strategy/ddp_strategy.h"

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
    {{"ddp", "a replica in every rank; gradients all-reduced in buckets while backward runs (S1)"}, make_ddp},
};

}  // namespace

const std::vector<StrategyInfo>& strategies() {
  static const std::vector<StrategyInfo> kInfos = [] {
    std::vector<StrategyInfo> infos;
    for (const Entry& entry : kEntries) infos.push_back(entry.info);
    return infos;
  }();
  return kInfos;
}

std::unique_ptr<Strategy> make_strategy(const World& world, const Task& task, const StrategyOptions& options) {
  std::vector<std::string> names;
  for (const Entry& entry : kEntries) {
    if (options.name == entry.info.name) return entry.make(world, task, options);
    names.emplace_back(entry.info.name);
  }
  throw UsageError({.what = concat("no such strategy: ", options.name), .next = concat("one of ", join(names, ", "))});
}

}  // namespace lockstep
