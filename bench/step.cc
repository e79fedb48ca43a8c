// SPDX-License-Identifier: Apache-2.0
// `lockstep bench step`: a data-parallel training step beside PyTorch's DistributedDataParallel over Gloo, in turn.
#include <iostream>

#include "bench/benchmarks.h"
#include "bench/harness.h"
#include "bench/processes.h"
#include "bench/step/training.h"
#include "lockstep/base/text.h"
#include "lockstep/error.h"

namespace lockstep::bench {
namespace {

struct Compared {
  StepCase one;
  Figures ours{};
  Figures theirs{};
};

Compared compare(const Program& program, const StepCase& one, const StepRun& run, bool with_pytorch) {
  Compared compared{.one = one};
  program.take_turns(one.name, [&](int) {
    compared.ours.add(run_lockstep_step(one, run));
    if (with_pytorch) compared.theirs.add(run_pytorch_step(one, run));
  });
  return compared;
}

std::string times_of(double theirs, double ours) { return theirs > 0 ? times(theirs / ours) : "-"; }

// SGD with momentum over p ranks reads p gradients, the momentum and the parameters once, and writes the latter two.
double limit_seconds(const Figures& ours, int ranks) {
  return (ranks + 4) * ours["parameter_mib"] * (1 << 20) / ours["copy"];
}

void print(const std::vector<Compared>& all, const StepRun& run, int turns) {
  Table steps(
      {"model", "batch", "MiB", "lockstep ms", "DDP ms", "no_sync ms", "DDP/ours", "no_sync/ours", "DDP exchange"});
  Table phases({"model", "forward", "backward", "wait", "update ms", "limit ms", "update at", "update+wait at"});
  Table memory({"model", "lockstep MiB", "above idle", "DDP MiB", "above idle", "saved"});
  for (const auto& [one, ours, theirs] : all) {
    const double exchange = theirs["ddp"] > 0 ? 1 - theirs["no_sync"] / theirs["ddp"] : 0;
    steps.add({one.name, concat(one.batch), fixed(ours["parameter_mib"], 1), milliseconds(ours["step"]),
               milliseconds(theirs["ddp"]), milliseconds(theirs["no_sync"]), times_of(theirs["ddp"], ours["step"]),
               times_of(theirs["no_sync"], ours["step"]), percent(exchange)});
    const double limit = limit_seconds(ours, run.ranks);
    phases.add({one.name, milliseconds(ours["forward"]), milliseconds(ours["backward"]), milliseconds(ours["wait"]),
                milliseconds(ours["update"]), milliseconds(limit), percent(limit / ours["update"]),
                percent(limit / (ours["update"] + ours["wait"]))});
    memory.add({one.name, fixed(ours["memory_mib"], 0), fixed(ours["memory_mib"] - ours["idle_mib"], 0),
                fixed(theirs["memory_mib"], 0), fixed(theirs["memory_mib"] - theirs["idle_mib"], 0),
                theirs["memory_mib"] > 0 ? percent(1 - ours["memory_mib"] / theirs["memory_mib"]) : "-"});
  }
  std::cout << "A step, SGD with momentum, " << run.ranks << " ranks x 1 thread; medians of " << run.steps
            << " steps, then of " << turns << " turns\n"
            << machine() << "\n\n";
  steps.print(std::cout);
  std::cout << "\nWhere lockstep's step goes. limit: the bytes that must move, at the speed of all ranks' memcpy\n";
  phases.print(std::cout);
  std::cout << "\nMemory: the sum of PSS over the ranks\n";
  memory.print(std::cout);
}

Json to_json(const std::vector<Compared>& all, const StepRun& run, int turns) {
  Json json{{"ranks", run.ranks}, {"turns", turns}, {"steps", run.steps}};
  for (const auto& [one, ours, theirs] : all)
    json["models"][one.name] = {{"lockstep", ours.medians()}, {"pytorch", theirs.medians()}};
  return json;
}

}  // namespace

int bench_step(int argc, const char* const* argv) {
  std::vector<std::string> models;
  StepRun run;
  bool separate = false;
  Program program("step", "A data-parallel training step beside PyTorch's DistributedDataParallel over Gloo, in turn.",
                  3);
  program.list("--models", models, "which of them; all by default")->check(CLI::IsMember(names_of(step_cases())));
  program.option("--ranks", run.ranks, "ranks of one thread each")->check(CLI::Range(1, 64));
  program.option("--steps", run.steps, "steps per turn")->check(CLI::Range(1, 10000));
  program.flag("--separate-parameters", separate, "lockstep with share_parameters = false: buckets and private copies");
  program.option("--virtual-shards", run.virtual_shards, "lockstep with these; 0: none");
  if (const auto exit_code = program.parse(argc, argv)) return *exit_code;
  run.share_parameters = !separate;
  const std::string missing = why_no_python("torch, numpy");
  if (!missing.empty()) std::cout << "PyTorch is not measured: " << missing << "\n";
  std::vector<Compared> all;
  for (const StepCase& one : chosen(step_cases(), models)) all.push_back(compare(program, one, run, missing.empty()));
  print(all, run, program.turns());
  program.save(to_json(all, run, program.turns()));
  return 0;
}

}  // namespace lockstep::bench
