// SPDX-License-Identifier: Apache-2.0
#include "bench/plan_cases.h"

#include "lockstep/base/hash.h"
#include "lockstep/base/text.h"
#include "lockstep/models.h"
#include "lockstep/train/builtin.h"

namespace lockstep::bench {
namespace {

using plan::Choice;

struct Model {
  const char* name;
  int64_t batch;
  int pieces;  // into which it can be cut: at most so many stages
};
constexpr Model kModels[] = {{"lenet", 256, 4}, {"mlp", 256, 3}, {"gpt-mini", 16, 6}};
constexpr int kHosts[] = {2, 4, 8};
constexpr int kLinks[] = {100, 1000};  // Mb/s

void add_pipelines(std::vector<Choice>& all, int stages) {
  for (const PipelineSchedule order : {PipelineSchedule::kNaive, PipelineSchedule::kGPipe, PipelineSchedule::k1F1B})
    all.push_back({.kind = StrategyKind::kPipeline,
                   .order = order,
                   .stages = stages,
                   .micro_batches = order == PipelineSchedule::kNaive ? 1 : 4});
}

std::vector<Choice> choices_on(const Model& model, int devices) {
  std::vector<Choice> all{{.kind = StrategyKind::kDdp},
                          {.kind = StrategyKind::kTowers},
                          {.kind = StrategyKind::kTowers, .update_on_cpu = true},
                          {.kind = StrategyKind::kDataParallel},
                          {.kind = StrategyKind::kKVStore},
                          {.kind = StrategyKind::kKVStore, .store = KVStoreKind::kDistSync},
                          {.kind = StrategyKind::kKVStore, .store = KVStoreKind::kDistAsync},
                          {.kind = StrategyKind::kAveraging, .averaging = {.every = 1}},
                          {.kind = StrategyKind::kAveraging, .averaging = {.every = 8}}};
  if (devices <= model.pieces) add_pipelines(all, devices);
  return all;
}

// Towers, data_parallel and the local stores are threads of one process.
std::vector<Choice> choices_between(const Model& model, int hosts) {
  std::vector<Choice> all{{.kind = StrategyKind::kDdp},
                          {.kind = StrategyKind::kAveraging, .averaging = {.every = 1}},
                          {.kind = StrategyKind::kAveraging, .averaging = {.every = 8}},
                          {.kind = StrategyKind::kKVStore, .store = KVStoreKind::kDistSync, .servers = 1},
                          {.kind = StrategyKind::kKVStore, .store = KVStoreKind::kDistSync, .servers = hosts},
                          {.kind = StrategyKind::kKVStore, .store = KVStoreKind::kDistAsync, .servers = 1}};
  if (hosts <= model.pieces) add_pipelines(all, hosts);
  return all;
}

}  // namespace

std::string PlanCase::target() const {
  if (hosts > 1) return concat(model, ", ", hosts, " hosts, ", link_mbit, " Mb/s");
  return concat(model, ", ", devices, devices == 1 ? " device" : " devices");
}

std::string PlanCase::name() const { return concat(target(), ": ", choice.name()); }

bool PlanCase::held_out() const { return (hash_of(name()) >> 7U) % 2 == 1; }

const OptimizerOptions& plan_optimizer() {
  static const OptimizerOptions options = SGDOptions{.lr = 0.001, .momentum = 0.9};
  return options;
}

plan::Subject subject_of(const PlanCase& one) {
  const Task task = model_task(one.model);
  return {.task = task, .strategy = {.optimizer = plan_optimizer(), .seed = 1}, .batch = one.batch, .data = [task] {
            return load_datasets({.data = "auto"}, task);
          }};
}

std::vector<PlanCase> plan_cases() {
  std::vector<PlanCase> cases;
  for (const Model& model : kModels) {
    cases.push_back({.model = model.name, .batch = model.batch, .choice = {.kind = StrategyKind::kSingle}});
    for (const int devices : {2, 4})
      for (const Choice& choice : choices_on(model, devices))
        cases.push_back({.model = model.name, .batch = model.batch, .devices = devices, .choice = choice});
  }
  return cases;
}

std::vector<PlanCase> plan_cases_of_hosts() {
  std::vector<PlanCase> cases;
  for (const Model& model : kModels)
    for (const int hosts : kHosts)
      for (const int link : kLinks)
        for (const Choice& choice : choices_between(model, hosts))
          cases.push_back(
              {.model = model.name, .batch = model.batch, .hosts = hosts, .link_mbit = link, .choice = choice});
  return cases;
}

std::vector<std::string> left_out_of_hosts() {
  std::vector<std::string> lines;
  for (const Model& model : kModels)
    for (const int hosts : kHosts)
      if (hosts > model.pieces)
        lines.push_back(
            concat(model.name, ", ", hosts, " hosts: no pipeline, as the model has ", model.pieces, " pieces"));
  return lines;
}

}  // namespace lockstep::bench
