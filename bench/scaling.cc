// SPDX-License-Identifier: Apache-2.0
// `lockstep bench scaling`: a training step on 1, 2, 4, ... and all cores, each with every division of the cores into ranks and
// their threads, beside PyTorch in one process that has the same cores. Every core brings its own samples.
#include <algorithm>
#include <iostream>
#include <set>

#include <torch/version.h>

#include "bench/harness.h"
#include "bench/processes.h"
#include "bench/step_systems.h"
#include "lockstep/base/process/core_places.h"
#include "lockstep/base/text.h"
#include "lockstep/base/to_size.h"
#include "lockstep/cores.h"

namespace lockstep::bench {
namespace {

// 1, 2, 4, ..., all.
std::vector<int> doublings(int all) {
  std::vector<int> numbers;
  for (int number = 1; number < all; number *= 2) numbers.push_back(number);
  numbers.push_back(all);
  return numbers;
}

// This process, and what it starts, has no other cores meanwhile.
class OnCores {
 public:
  explicit OnCores(const CoreSet& cores) : before_(usable_cores()) { pin_this_thread(cores); }
  ~OnCores() { pin_this_thread(before_); }
  OnCores(const OnCores&) = delete;
  OnCores& operator=(const OnCores&) = delete;

 private:
  CoreSet before_;
};

// The first cores of neighbours.
CoreSet first_cores(int count) {
  CoreSet cores = neighbours_first(usable_cores(), read_core_places());
  cores.resize(to_size(count));
  std::ranges::sort(cores);
  return cores;
}

struct Scaled {
  int cores;
  StepCase one;
  Figures seconds{};  // by division, "2 x 4", and "PyTorch"
  Figures copied{};   // "GB/s" that ranks of one thread read and write together

  double samples_per_second(const std::string& name) const {
    return seconds[name] > 0 ? static_cast<double>(one.batch) / seconds[name] : 0;
  }
};

std::string name_of(int ranks, int threads) { return concat(ranks, " x ", threads); }

// One turn of every system on these cores.
void measure(Scaled& each, StepRun run, bool with_pytorch) {
  const OnCores few(first_cores(each.cores));
  Seconds seconds;
  for (const int ranks : doublings(each.cores)) {
    if (each.cores % ranks != 0) continue;
    run.ranks = ranks;
    run.threads = each.cores / ranks;
    Seconds found = run_lockstep_step(each.one, run);
    seconds[name_of(run.ranks, run.threads)] = found["step"];
    if (run.threads == 1) each.copied.add({{"GB/s", found["copy"] / 1e9}});
  }
  if (with_pytorch) {
    std::vector<double> theirs;
    for (const std::string& layout : std::set<std::string>{"contiguous", each.one.layout})
      for (const auto& [name, time] : run_pytorch_step(each.one, run, /*ranks=*/0, layout)) theirs.push_back(time);
    seconds["PyTorch"] = least_measured(theirs);
  }
  each.seconds.add(seconds);
}

std::vector<Scaled> scale(const Program& program, const StepCase& model, const StepRun& run, bool with_pytorch) {
  constexpr int kCoresOfTable = 2;  // of `lockstep bench step`, whose batch is global
  std::vector<Scaled> all;
  for (const int cores : doublings(static_cast<int>(usable_cores().size()))) {
    all.push_back({.cores = cores, .one = model});
    all.back().one.batch = model.batch / kCoresOfTable * cores;
  }
  program.take_turns(model.name, [&](int) {
    for (Scaled& each : all) measure(each, run, with_pytorch);
  });
  return all;
}

void print(const std::vector<Scaled>& all) {
  Table table({"model", "cores", "ranks x threads", "ms", "samples/s", "of 1 core's, per core", "ours/PyTorch's"});
  for (const Scaled& each : all) {
    const std::string alone = name_of(1, 1);
    const Scaled& first = *std::ranges::find(all, each.one.name, [](const Scaled& one) { return one.one.name; });
    const Json medians = each.seconds.medians();
    for (const auto& [name, seconds] : medians.items()) {
      const double rate = each.samples_per_second(name), theirs = each.samples_per_second("PyTorch");
      const double of_one = first.samples_per_second(name == "PyTorch" ? name : alone);
      table.add({each.one.name, concat(each.cores), name == "PyTorch" ? concat("PyTorch, 1 x ", each.cores) : name,
                 milliseconds(seconds.get<double>()), fixed(rate, 0), percent(rate / of_one / each.cores),
                 theirs > 0 && name != "PyTorch" ? times(rate / theirs) : ""});
    }
  }
  table.print(std::cout);
}

Json to_json(const std::vector<Scaled>& all, const StepRun& run, int turns, const std::string& pytorch) {
  Json json{
      {"topology", split(draw_machine(usable_cores(), 0), '\n')},
      {"versions", {{"lockstep", LOCKSTEP_VERSION}, {"libtorch", TORCH_VERSION}, {"PyTorch", pytorch}}},
      {"settings", {{"turns", turns}, {"warmup", run.warmup}, {"steps", run.steps}, {"optimizer", "SGD, momentum"}}}};
  for (const char* name : {"OMP_NUM_THREADS", "KMP_AFFINITY", "GOMP_CPU_AFFINITY", "LD_PRELOAD", "LOCKSTEP_CHECK"})
    if (const char* value = std::getenv(name)) json["settings"][name] = value;
  for (const Scaled& each : all)
    json["models"][each.one.name].push_back({{"cores", each.cores},
                                             {"samples", each.one.batch},
                                             {"copied", each.copied.medians()},
                                             {"seconds", each.seconds.medians()},
                                             {"ranges", each.seconds.ranges()}});
  return json;
}

}  // namespace

int bench_scaling(int argc, const char* const* argv) {
  std::vector<std::string> models = {"mlp", "lenet"};
  StepRun run;
  Program program("scaling", "A training step on 1, 2, 4, ... and all cores, beside PyTorch in one process.", 3);
  program.list("--models", models, "which of those of lockstep bench step")
      ->check(CLI::IsMember(names_of(step_cases())));
  program.option("--steps", run.steps, "steps per turn")->check(CLI::Range(1, 10000));
  return program.run(argc, argv, [&] {
    const std::string missing = why_no_python("torch, torchvision");
    if (!missing.empty()) std::cout << "PyTorch is not measured: " << missing << "\n";
    std::vector<Scaled> all;
    for (const StepCase& model : chosen(step_cases(), models))
      for (Scaled& each : scale(program, model, run, missing.empty())) all.push_back(std::move(each));
    std::cout << "A step, SGD with momentum; every core brings its own samples; medians of " << run.steps
              << " steps, then of " << program.turns() << " turns\n"
              << machine() << "\n"
              << draw_machine(usable_cores(), 0) << "PyTorch: the faster memory order, malloc as it is or keeping "
              << "freed memory, a fused optimizer\n\n";
    print(all);
    program.save(
        to_json(all, run, program.turns(), missing.empty() ? run_python("peers/step.py", {"version"}) : "none"));
  });
}

}  // namespace lockstep::bench
