// SPDX-License-Identifier: Apache-2.0
#include "bench/plan_cases.h"

#include "lockstep/base/hash.h"
#include "lockstep/base/text.h"

namespace lockstep::bench {
namespace {

using plan::Choice;
using plan::Method;

struct Model {
  const char* name;
  std::int64_t batch;
};
constexpr Model kModels[] = {{"lenet", 256}, {"mlp", 256}, {"gpt-mini", 16}};

// mlp has 3 pieces, so it has no pipeline of 4 stages.
std::vector<Choice> choices_on(int devices, bool can_be_cut) {
  std::vector<Choice> all{{.method = Method::kDdp},
                          {.method = Method::kTowers},
                          {.method = Method::kTowers, .update_on_cpu = true},
                          {.method = Method::kDataParallel},
                          {.method = Method::kStoreLocal},
                          {.method = Method::kStoreSync},
                          {.method = Method::kStoreAsync},
                          {.method = Method::kAveraging, .average_every = 1},
                          {.method = Method::kAveraging, .average_every = 8}};
  if (!can_be_cut) return all;
  for (const PipelineSchedule order : {PipelineSchedule::kNaive, PipelineSchedule::kGPipe, PipelineSchedule::k1F1B})
    all.push_back({.method = Method::kPipeline,
                   .order = order,
                   .stages = devices,
                   .micro_batches = order == PipelineSchedule::kNaive ? 1 : 4});
  return all;
}

}  // namespace

std::string PlanCase::name() const {
  return concat(model, ", ", devices, devices == 1 ? " device: " : " devices: ", choice.name());
}

bool PlanCase::held_out() const { return (hash_of(name()) >> 7U) % 2 == 1; }

std::vector<PlanCase> plan_cases() {
  std::vector<PlanCase> cases;
  for (const Model& model : kModels) {
    cases.push_back({.model = model.name, .batch = model.batch, .choice = {.method = Method::kSingle}});
    for (const int devices : {2, 4})
      for (const Choice& choice : choices_on(devices, devices == 2 || std::string(model.name) != "mlp"))
        cases.push_back({.model = model.name, .batch = model.batch, .devices = devices, .choice = choice});
  }
  return cases;
}

}  // namespace lockstep::bench
