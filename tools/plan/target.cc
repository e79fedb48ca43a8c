// SPDX-License-Identifier: Apache-2.0
#include "tools/plan/target.h"

#include "lockstep/base/text.h"
#include "lockstep/strategy/option_names.h"

namespace lockstep::plan {
namespace {

// "kvstore dist_sync", with `option` between the two.
std::string text_of(const Choice& choice, const char* option) {
  const std::string name = strategy_info(choice.kind).name;
  return choice.kind == Choice::kKVStore ? concat(name, option, ' ', name_of(choice.store)) : name;
}

// One, two, four, eight, and one for each of up to 16 machines. On one machine a second server has no link to add.
std::vector<int> numbers_of_servers(const Target& target) {
  if (target.servers > 0) return {target.servers};
  std::vector<int> numbers;
  for (int servers = 1; servers <= std::min(target.machines, 8); servers *= 2) numbers.push_back(servers);
  if (target.machines <= 16 && numbers.back() != target.machines) numbers.push_back(target.machines);
  return numbers;
}

void add_pipelines(std::vector<Choice>& all, const Target& target) {
  using enum StrategyKind;
  const int stages = target.all_devices();
  all.push_back({.kind = kPipeline, .order = PipelineSchedule::kNaive, .stages = stages, .micro_batches = 1});
  for (const PipelineSchedule order : {PipelineSchedule::kGPipe, PipelineSchedule::k1F1B})
    for (const int micro_batches : {2, 4, 8, 16})
      if (micro_batches <= target.batch)
        all.push_back({.kind = kPipeline, .order = order, .stages = stages, .micro_batches = micro_batches});
}

}  // namespace

void require_possible(const Target& target) {
  const int64_t devices = int64_t{target.machines} * target.devices;
  if (devices < 1 || devices > kMostDevices || devices > target.batch)
    throw UsageError({.what = concat("a target that can't be: a batch of ", target.batch, " for ", devices, " devices"),
                      .next = concat("give each device a sample or more; there may be ", kMostDevices, " devices")});
}

std::string Choice::name() const {
  const std::string name = text_of(*this, "");
  if (has_servers()) return concat(name, ", ", servers, servers == 1 ? " server" : " servers");
  if (kind == kTowers && update_on_cpu) return name + ", one update";
  if (kind == kAveraging) return concat(name, ", h = ", averaging.every);
  if (kind != kPipeline) return name;
  const std::string stages_and_parts =
      order == PipelineSchedule::kNaive ? concat(stages, " stages") : concat(stages, " x ", micro_batches);
  return concat(name, " ", name_of(order), ", ", stages_and_parts);
}

std::string Choice::arguments(int ranks) const {
  std::string text = concat("--strategy ", text_of(*this, " --kvstore"));
  if (has_servers()) text += concat(" --servers ", servers);
  if (kind == kTowers && update_on_cpu) text += " --update cpu";
  if (kind == kAveraging) text += concat(" --average-every ", averaging.every);
  if (kind == kPipeline)
    text += concat(" --pipeline-schedule ", name_of(order), " --stages ", stages, " --micro-batches ", micro_batches);
  return ranks > 1 && kind != kSingle ? concat(text, " --ranks ", ranks) : text;
}

Target Choice::on(Target target) const {
  if (kind == kSingle) target.devices = 1;
  return target;
}

StrategyOptions Choice::options(StrategyOptions others) const {
  others.kind = kind;
  if (kind == kTowers) others.towers.update = update_on_cpu ? UpdateOn::kCpu : UpdateOn::kDevice;
  if (kind == kAveraging) others.averaging = averaging;
  if (kind == kKVStore) others.kvstore.kind = store;
  if (has_servers()) others.kvstore.servers = servers;
  if (kind == kPipeline)
    others.pipeline = {.stages = concat(stages), .micro_batches = micro_batches, .schedule = order};
  return others;
}

bool Choice::has_device_threads() const { return strategy_info(kind).threads && !has_servers(); }

bool Choice::exact() const { return store != KVStoreKind::kDistAsync && kind != kAveraging; }

std::vector<Choice> choices_for(const Target& target, int pieces) {
  using enum StrategyKind;
  if (target.all_devices() == 1) return {{.kind = kSingle}};
  std::vector<Choice> all{{.kind = kDdp}};
  if (target.machines == 1) {
    all.insert(all.end(), {{.kind = kSingle},
                           {.kind = kTowers},
                           {.kind = kTowers, .update_on_cpu = true},
                           {.kind = kDataParallel},
                           {.kind = kKVStore}});
  }
  constexpr int kMostWorkers = 64;  // more hold each other up at any server
  if (target.all_devices() <= kMostWorkers || target.servers > 0)
    for (const int servers : numbers_of_servers(target))
      for (const KVStoreKind store : {KVStoreKind::kDistSync, KVStoreKind::kDistAsync})
        all.push_back({.kind = kKVStore, .store = store, .servers = servers});
  Choice one{.kind = kAveraging, .averaging = target.averaging};
  for (const int every : {1, 4, 8, 16}) {
    one.averaging.every = every;
    if (std::max(one.averaging.parts, one.averaging.delay) <= every) all.push_back(one);
  }
  if (target.all_devices() <= pieces) add_pipelines(all, target);
  return all;
}

}  // namespace lockstep::plan
