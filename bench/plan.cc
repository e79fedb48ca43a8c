// SPDX-License-Identifier: Apache-2.0
// `lockstep bench plan`: what `lockstep plan` forecasts beside what is measured: a profile of each model, then every case
// (bench/plan_cases.h) trained for some steps, all in one run.
#include <unistd.h>

#include <cmath>
#include <fstream>
#include <iostream>
#include <numeric>

#include <ATen/Parallel.h>

#include "bench/harness.h"
#include "bench/plan_cases.h"
#include "bench/plan_curves.h"
#include "bench/processes.h"
#include "lockstep/base/file.h"
#include "lockstep/base/text.h"
#include "lockstep/cores.h"
#include "lockstep/deadline.h"
#include "lockstep/error.h"
#include "lockstep/launch/launcher.h"
#include "lockstep/memory.h"
#include "lockstep/models.h"
#include "lockstep/plan/forecast.h"
#include "lockstep/plan/measure.h"
#include "lockstep/sampler.h"
#include "lockstep/strategy.h"
#include "lockstep/train/builtin.h"

namespace lockstep::bench {
namespace {

using plan::Choice;
using plan::Forecast;
using plan::Method;

constexpr int kStepsPerFigure = 8;  // steps whose mean is one figure: averaging does one average in so many at most
constexpr double kWindowsFor = 2;   // seconds
constexpr int kFewestWindows = 3, kMostWindows = 20;

const OptimizerOptions& plan_optimizer() {
  static const OptimizerOptions options = SGDOptions{.lr = 0.001, .momentum = 0.9};
  return options;
}

bool has_threads(const Choice& choice) {
  return choice.method != Method::kSingle && choice.method != Method::kDdp && !choice.has_servers();
}

StrategyOptions strategy_of(const PlanCase& one) {
  const Choice& choice = one.choice;
  StrategyOptions options{.optimizer = plan_optimizer(), .seed = 1};
  options.compression.kind = choice.compression;
  options.devices = has_threads(choice) ? one.devices : 1;
  switch (choice.method) {
    case Method::kSingle: options.kind = StrategyKind::kSingle; break;
    case Method::kDdp:
      options.kind = StrategyKind::kDdp;
      options.ddp.bucket_mib = std::max(1, static_cast<int>(choice.bucket_bytes) >> 20);
      break;
    case Method::kTowers:
      options.kind = StrategyKind::kTowers;
      options.towers.update = choice.update_on_cpu ? UpdatePlace::kCpu : UpdatePlace::kDevice;
      break;
    case Method::kDataParallel: options.kind = StrategyKind::kDataParallel; break;
    case Method::kStoreLocal: options.kind = StrategyKind::kKVStore; break;
    case Method::kStoreSync:
    case Method::kStoreAsync:
    case Method::kStoreBounded:
      options.kind = StrategyKind::kKVStore;
      options.kvstore.kind = choice.method == Method::kStoreSync    ? KVStoreKind::kDistSync
                             : choice.method == Method::kStoreAsync ? KVStoreKind::kDistAsync
                                                                    : KVStoreKind::kDistBounded;
      options.kvstore.staleness = choice.staleness;
      options.kvstore.servers = choice.servers;
      break;
    case Method::kAveraging:
      options.kind = StrategyKind::kAveraging;
      options.averaging.every = choice.average_every;
      break;
    case Method::kPipeline:
      options.kind = StrategyKind::kPipeline;
      options.pipeline = {
          .stages = concat(choice.stages), .micro_batches = choice.micro_batches, .schedule = choice.order};
      break;
  }
  return options;
}

// The samples of a worker, or of all devices of the only process; a server has none.
Batch part_of_rank(const Datasets& data, const PlanCase& one, const World& world) {
  const int servers = one.choice.has_servers() ? one.choice.servers : 0;
  if (world.rank() < servers) return {};
  const Range mine = even_part(one.batch, world.rank() - servers, world.size() - servers);
  std::vector<std::int64_t> indices(static_cast<std::size_t>(mine.end - mine.begin));
  std::iota(indices.begin(), indices.end(), mine.begin);
  return data.train->make_batch(indices);
}

struct MeasuredCase {
  double step = 0;    // seconds: the median over windows of steps
  double memory = 0;  // bytes, all processes together
};

// Every rank makes the same number of steps, which rank 0's first ones decide. Ranks of a store that are not in step go at
// their own pace: then the slowest worker's windows count.
MeasuredCase train_case(const PlanCase& one) {
  keep_freed_memory();
  const World world = World::from_env();
  at::set_num_threads(
      std::max(1, static_cast<int>(usable_cores().size()) / std::max(1, has_threads(one.choice) ? one.devices : 1)));
  const Task task = model_task(one.model);
  const Datasets data = load_datasets({.data = "auto"}, task);
  const auto strategy = make_strategy(world, task, strategy_of(one));
  const Batch batch = part_of_rank(data, one, world);
  const auto steps = [&](int count) {
    const Stopwatch watch;
    for (int i = 0; i < count; ++i) {
      strategy->forward_backward(batch);
      strategy->update();
    }
    return watch.seconds() / count;
  };
  const auto most = [&](double value) {
    const torch::Tensor tensor = torch::full({1}, value, torch::kFloat64);
    world.all_reduce(tensor, ReduceOp::kMax);
    return tensor.item<double>();
  };
  steps(kStepsPerFigure / 2);
  const double first = most(steps(kStepsPerFigure / 2));
  const int windows =
      std::clamp(static_cast<int>(kWindowsFor / (first * kStepsPerFigure)), kFewestWindows, kMostWindows);
  Turns seconds;
  for (int i = 0; i < windows; ++i) seconds.push_back(most(steps(kStepsPerFigure)));
  const torch::Tensor memory = torch::full({1}, pss_bytes(::getpid()), torch::kFloat64);
  world.all_reduce(memory);
  return {.step = median(seconds), .memory = memory.item<double>()};
}

MeasuredCase measure_case(const PlanCase& one) {
  const TemporaryFolder folder;
  const std::string results = folder.file("results");
  const auto rank = [&] {
    const MeasuredCase measured = train_case(one);
    const char* const number = std::getenv("RANK");
    if (number == nullptr || std::string(number) == "0")
      write_file(results, Json{{"step", measured.step}, {"memory", measured.memory}}.dump());
    return 0;
  };
  const int servers = one.choice.has_servers() ? one.choice.servers : 0;
  const LaunchResult ended = launch({.ranks = servers + (has_threads(one.choice) ? 1 : one.devices),
                                     .servers = servers,
                                     .output = RankOutput::kFirst},
                                    rank);
  if (ended.exit_code != 0)
    throw SystemError({.what = concat(one.name(), ": a rank ended with code ", ended.exit_code)});
  const Json found = Json::parse(read_file(results));
  return {.step = found.at("step"), .memory = found.at("memory")};
}

// ---- forecasts beside measurements

struct PlanResult {
  PlanCase one;
  Forecast forecast;
  MeasuredCase measured;
  double step_error() const { return forecast.step / measured.step - 1; }
  double memory_error() const { return forecast.memory / measured.memory - 1; }
};

std::string signed_percent(double share) { return concat(share > 0 ? "+" : "", fixed(100 * share, 0), " %"); }

double mean_error(const std::vector<PlanResult>& results, double (PlanResult::*error)() const) {
  double sum = 0;
  for (const PlanResult& each : results) sum += std::abs((each.*error)());
  return results.empty() ? 0 : sum / static_cast<double>(results.size());
}

std::vector<PlanResult> those_of(const std::vector<PlanResult>& results,
                                 const std::function<bool(const PlanResult&)>& good) {
  std::vector<PlanResult> found;
  for (const PlanResult& each : results)
    if (good(each)) found.push_back(each);
  return found;
}

// Of every model and number of devices: how much slower the recommended choice is than the fastest, both as measured.
void print_choices(const std::vector<PlanResult>& results, Json& json) {
  Table table({"model, devices", "recommended", "fastest", "slower by"});
  std::map<std::string, std::vector<PlanResult>> targets;
  for (const PlanResult& each : results)
    if (each.one.devices > 1 && each.one.choice.exact())
      targets[concat(each.one.model, ", ", each.one.devices)].push_back(each);
  int good = 0;
  for (const auto& [name, all] : targets) {
    const PlanResult& chosen =
        *std::ranges::min_element(all, {}, [](const PlanResult& each) { return each.forecast.step; });
    const PlanResult& fastest =
        *std::ranges::min_element(all, {}, [](const PlanResult& each) { return each.measured.step; });
    const double loss = chosen.measured.step / fastest.measured.step - 1;
    if (loss <= 0.05) ++good;
    table.add({name, chosen.one.choice.name(), fastest.one.choice.name(), percent(loss, 1)});
    json["choices"].push_back({{"target", name},
                               {"recommended", chosen.one.choice.name()},
                               {"fastest", fastest.one.choice.name()},
                               {"slower_by", loss}});
  }
  std::cout << "\nThe choice, of those that compute the same as one device\n";
  table.print(std::cout);
  std::cout << "within 5 %: " << good << " of " << targets.size() << "\n";
}

void print_means(const std::vector<PlanResult>& results, int cores, Json& json) {
  Table table({"mean error", "cases", "step", "memory"});
  const auto add = [&](const std::string& name, const std::vector<PlanResult>& some) {
    if (some.empty()) return;
    const double step = mean_error(some, &PlanResult::step_error), memory = mean_error(some, &PlanResult::memory_error);
    table.add({name, concat(some.size()), percent(step, 1), percent(memory, 1)});
    json["mean_errors"][name] = {{"cases", some.size()}, {"step", step}, {"memory", memory}};
  };
  const auto crowded = [cores](const PlanResult& each) { return each.one.devices > cores; };
  for (const bool held_out : {false, true}) {
    const std::string which = held_out ? ", held out" : "";
    add("a core for each device" + which,
        those_of(results, [&](const PlanResult& each) { return each.one.held_out() == held_out && !crowded(each); }));
    add("more devices than cores" + which,
        those_of(results, [&](const PlanResult& each) { return each.one.held_out() == held_out && crowded(each); }));
  }
  std::cout << '\n';
  table.print(std::cout);
}

void print_cases(const std::vector<PlanResult>& results, Json& json) {
  Table table({"case", "", "forecast ms", "+-", "measured ms", "error", "forecast MB", "measured MB", "error"});
  for (const PlanResult& each : results) {
    table.add({each.one.name(), each.one.held_out() ? "held out" : "", milliseconds(each.forecast.step),
               percent(each.forecast.uncertain), milliseconds(each.measured.step), signed_percent(each.step_error()),
               fixed(each.forecast.memory / 1e6, 0), fixed(each.measured.memory / 1e6, 0),
               signed_percent(each.memory_error())});
    json["cases"].push_back({{"name", each.one.name()},
                             {"held_out", each.one.held_out()},
                             {"forecast_seconds", each.forecast.step},
                             {"uncertain", each.forecast.uncertain},
                             {"bound", each.forecast.bound},
                             {"measured_seconds", each.measured.step},
                             {"forecast_memory", each.forecast.memory},
                             {"measured_memory", each.measured.memory}});
  }
  table.print(std::cout);
}

}  // namespace

int bench_plan(int argc, const char* const* argv) {
  std::vector<std::string> models;
  bool held_out = false, curves = false;
  Program program("plan", "Forecasts of lockstep plan beside measurements of the same run, on this machine.", 1);
  program.list("--models", models, "lenet, mlp, gpt-mini; all by default");
  program.flag("--held-out", held_out, "also the half of the cases that is held out");
  program.flag("--curves", curves, "forecasts beside scaling curves that others have published; measures nothing");
  return program.run(argc, argv, [&] {
    if (curves) {
      Json json;
      print_curves(std::cout, json);
      return program.save(json);
    }
    const int cores = static_cast<int>(usable_cores().size());
    std::vector<PlanResult> results;
    Json profiles;
    std::string model;
    plan::Profile profile;
    for (const PlanCase& one : plan_cases()) {
      if (!models.empty() && std::ranges::count(models, one.model) == 0) continue;
      if (one.held_out() && !held_out) continue;
      if (one.model != model) {
        model = one.model;
        show_progress(concat(model, ": profile"));
        const Task task = model_task(model);
        profile = plan::measure(
            {.task = task, .strategy = {.optimizer = plan_optimizer(), .seed = 1}, .batch = one.batch, .data = [task] {
               return load_datasets({.data = "auto"}, task);
             }});
      }
      const plan::Target target{.devices = one.devices, .batch = one.batch, .servers = one.choice.servers};
      PlanResult result{.one = one, .forecast = plan::forecast(profile, target, one.choice), .measured = {}};
      show_progress(one.name());
      result.measured = measure_case(one);
      results.push_back(result);
    }
    show_progress("");
    Json json;
    print_cases(results, json);
    print_means(results, cores, json);
    print_choices(results, json);
    program.save(json);
  });
}

}  // namespace lockstep::bench
