// SPDX-License-Identifier: Apache-2.0
// `lockstep bench step`: a data-parallel training step beside PyTorch's DistributedDataParallel, in turn: on cores over Gloo, or
// with a GPU for each rank over NCCL. On cores also beside PyTorch in one process that has all of them.
#include <algorithm>
#include <iostream>
#include <set>

#include "agent/clusters/environment.h"
#include "bench/harness.h"
#include "bench/processes.h"
#include "bench/step_systems.h"
#include "lockstep/base/text.h"

namespace lockstep::bench {
namespace {

// One process with a thread for each core, on the whole batch.
Seconds run_lockstep_alone(const StepCase& one, StepRun run) {
  run.ranks = 1;
  run.threads = allotted_cores();
  return run_lockstep_step(one, run);
}

struct Compared {
  StepCase one;
  Figures ours{};
  Figures alone{};  // ours, in one process
  Figures theirs{};

  double one_process() const {
    return least_measured({theirs["one_process_contiguous"], theirs["one_process_channels_last"]});
  }
  double one_process_kept() const {
    return least_measured({theirs["one_process_contiguous_kept"], theirs["one_process_channels_last_kept"]});
  }
  double best_alternative() const { return least_measured({theirs["ddp"], one_process(), one_process_kept()}); }
  double best() const { return least_measured({ours["step"], ours["one_process"]}); }
};

Compared compare(const Program& program, const StepCase& one, const StepRun& run, bool with_pytorch) {
  Compared compared{.one = one};
  program.take_turns(one.name, [&](int) {
    Seconds mine = run_lockstep_step(one, run);
    if (run.device == "cpu") {
      const Seconds alone = run_lockstep_alone(one, run);
      compared.alone.add(alone);
      mine["one_process"] = alone.at("step");
    }
    compared.ours.add(mine);
    if (!with_pytorch) return;
    compared.theirs.add(run_pytorch_step(one, run, run.ranks, one.layout));
    if (run.device != "cpu") return;
    for (const std::string& layout : std::set<std::string>{"contiguous", one.layout})
      compared.theirs.add(run_pytorch_step(one, run, /*ranks=*/0, layout));
  });
  return compared;
}

std::string milliseconds_of(double seconds) { return seconds > 0 ? milliseconds(seconds) : "-"; }
std::string times_of(double theirs, double ours) { return theirs > 0 ? times(theirs / ours) : "-"; }

double parameter_bytes(const Figures& ours) { return ours["parameter_mib"] * (1 << 20); }

// SGD with momentum over p ranks reads p gradients, the momentum and the parameters once, and writes the latter two.
double bytes_of_update(const Figures& ours, int ranks) { return (ranks + 4) * parameter_bytes(ours); }

// Before it each rank reads the parameters forward and backward and writes gradients, whose memory is fetched first.
double bytes_of_step(const Figures& ours, int ranks) {
  return 4 * ranks * parameter_bytes(ours) + bytes_of_update(ours, ranks);
}

void add_limits(Table& table, const std::string& model, const Figures& ours, int ranks) {
  const double bytes = bytes_of_step(ours, ranks), operations = ours["operations"], step = ours["step"];
  const double memory = bytes / std::max(ours["copy"], ours["triad"]), computing = operations / ours["sgemm"];
  table.add({model, concat(ranks), fixed(parameter_bytes(ours) / 1e6, 1), fixed(bytes / 1e6, 1),
             fixed(operations / 1e9, 2), fixed(ours["copy"] / 1e9, 1), fixed(ours["triad"] / 1e9, 1),
             fixed(ours["sgemm"] / 1e9, 0), milliseconds(memory), milliseconds(computing), milliseconds(step),
             percent(std::max(memory, computing) / step), percent((memory + computing) / step)});
}

void print(const std::vector<Compared>& all, const StepRun& run, int turns) {
  Table steps({"model", "batch", "MiB", "lockstep ms", "one process ms", "DDP ms", "no_sync ms", "one process ms",
               "keeping memory ms", "DDP/ours", "best alternative/best of ours"});
  Table phases({"model", "forward", "backward", "wait", "update ms", "limit ms", "update at", "update+wait at"});
  Table memory({"model", "lockstep MiB", "above idle", "DDP MiB", "above idle", "saved"});
  Table limits({"model", "ranks", "K MB", "moved MB", "GFLOP", "copy GB/s", "triad GB/s", "sgemm GFLOP/s", "memory ms",
                "sgemm ms", "step ms", "larger/step", "sum/step"});
  for (const Compared& each : all) {
    const auto& [one, ours, alone, theirs] = each;
    steps.add({one.name, concat(one.batch), fixed(ours["parameter_mib"], 1), milliseconds(ours["step"]),
               milliseconds_of(ours["one_process"]), milliseconds_of(theirs["ddp"]), milliseconds_of(theirs["no_sync"]),
               milliseconds_of(each.one_process()), milliseconds_of(each.one_process_kept()),
               times_of(theirs["ddp"], ours["step"]), times_of(each.best_alternative(), each.best())});
    const double limit = bytes_of_update(ours, run.ranks) / ours["copy"];
    phases.add({one.name, milliseconds(ours["forward"]), milliseconds(ours["backward"]), milliseconds(ours["wait"]),
                milliseconds(ours["update"]), milliseconds(limit), percent(limit / ours["update"]),
                percent(limit / (ours["update"] + ours["wait"]))});
    if (run.device == "cpu") {
      add_limits(limits, one.name, ours, run.ranks);
      add_limits(limits, "", alone, 1);
    }
    memory.add({one.name, fixed(ours["memory_mib"], 0), fixed(ours["memory_mib"] - ours["idle_mib"], 0),
                fixed(theirs["memory_mib"], 0), fixed(theirs["memory_mib"] - theirs["idle_mib"], 0),
                theirs["memory_mib"] > 0 ? percent(1 - ours["memory_mib"] / theirs["memory_mib"]) : "-"});
  }
  std::cout << "A step, SGD with momentum, " << run.ranks
            << (run.device == "cpu" ? " ranks x 1 thread" : " ranks with a GPU each") << "; medians of " << run.steps
            << " steps, then of " << turns << " turns\n"
            << machine() << "\n\n";
  steps.print(std::cout);
  std::cout << "one process: all cores, the whole batch; first lockstep's, then PyTorch's with fused SGD in the faster "
               "memory order, also "
               "with\na malloc that keeps freed memory. The best alternative is PyTorch's fastest\n";
  std::cout << "\nWhere lockstep's step goes. limit: the bytes that must move, at the speed of all ranks' memcpy\n";
  phases.print(std::cout);
  if (run.device == "cpu") {
    std::cout
        << "\nWhat bounds lockstep's step, with ranks and in one process. moved: K bytes of parameters, and their "
           "gradients and\nmomentum, at the faster of copy (a thread of each rank) and triad, all ranks at once. "
           "A cache that holds them is faster\n";
    limits.print(std::cout);
  }
  std::cout << "\nMemory: the sum over the ranks of PSS, or of what is taken of each GPU\n";
  memory.print(std::cout);
}

Json to_json(const std::vector<Compared>& all, const StepRun& run, int turns) {
  Json json{{"device", run.device}, {"ranks", run.ranks}, {"turns", turns}, {"steps", run.steps}};
  for (const Compared& each : all) {
    Json& model = json["models"][each.one.name];
    model = {{"lockstep", each.ours.medians()},
             {"pytorch", each.theirs.medians()},
             {"ranges", {{"lockstep", each.ours.ranges()}, {"pytorch", each.theirs.ranges()}}}};
    if (run.device == "cpu") model["lockstep_alone"] = each.alone.medians();
    if (each.best_alternative() > 0) model["speed_up_over_best"] = each.best_alternative() / each.best();
  }
  return json;
}

}  // namespace

int bench_step(int argc, const char* const* argv) {
  std::vector<std::string> models;
  StepRun run;
  bool separate = false;
  Program program(
      "step", "A data-parallel training step beside PyTorch's DistributedDataParallel and one process, in turn.", 3);
  program.list("--models", models, "which of them; all by default")->check(CLI::IsMember(names_of(step_cases())));
  program.option("--ranks", run.ranks, "ranks of one thread each")->check(CLI::Range(1, 64));
  program.option("--steps", run.steps, "steps per turn")->check(CLI::Range(1, 10000));
  program.option("--device", run.device, "cpu, or cuda: a GPU for each rank; the peer exchanges over NCCL")
      ->check(CLI::IsMember(std::vector<std::string>{"cpu", "cuda"}));
  program.flag("--separate-parameters", separate, "lockstep with share_parameters = false: buckets and private copies");
  program.option("--virtual-shards", run.virtual_shards, "lockstep with these; 0: none");
  return program.run(argc, argv, [&] {
    run.share_parameters = !separate;
    const std::string missing = why_no_python("torch, torchvision");
    if (!missing.empty()) std::cout << "PyTorch is not measured: " << missing << "\n";
    std::vector<Compared> all;
    for (const StepCase& one : chosen(step_cases(), models)) {
      all.push_back(compare(program, one, run, missing.empty()));
      program.save(to_json(all, run, program.turns()));
    }
    print(all, run, program.turns());
  });
}

}  // namespace lockstep::bench
