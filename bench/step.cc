// `lockstep bench step`: a data-parallel training step beside PyTorch's DistributedDataParallel over Gloo, in turn.
#include <algorithm>
#include <iostream>
#include <map>

#include "bench/benchmarks.h"
#include "bench/command_line.h"
#include "bench/python_peer.h"
#include "bench/report.h"
#include "bench/step/training.h"
#include "lockstep/base/text.h"
#include "lockstep/error.h"

namespace lockstep::bench {
namespace {

struct Options {
  std::vector<std::string> models;
  StepRun run;
  int turns = 3;
  std::string json;
};

// Medians over the turns.
class Medians {
 public:
  void add(const Seconds& seconds) {
    for (const auto& [name, value] : seconds) all_[name].push_back(value);
  }
  double operator[](const std::string& name) const {
    const auto found = all_.find(name);
    return found == all_.end() ? 0 : median(found->second);
  }
  nlohmann::ordered_json to_json() const {
    nlohmann::ordered_json json;
    for (const auto& [name, values] : all_) json[name] = median(values);
    return json;
  }

 private:
  std::map<std::string, std::vector<double>> all_;
};

struct Compared {
  StepCase one;
  Medians ours;
  Medians theirs;
};

Compared compare(const StepCase& one, const Options& options, bool with_pytorch) {
  Compared compared{.one = one, .ours = {}, .theirs = {}};
  for (int turn = 0; turn < options.turns; ++turn) {
    std::cerr << "\r" << one.name << ", turn " << turn + 1 << " of " << options.turns << "      " << std::flush;
    compared.ours.add(run_lockstep_step(one, options.run));
    if (with_pytorch) compared.theirs.add(run_pytorch_step(one, options.run));
  }
  std::cerr << "\r" << std::string(40, ' ') << "\r";
  return compared;
}

std::string milliseconds(double seconds) { return fixed(seconds * 1e3, 2); }
std::string times(double theirs, double ours) { return theirs > 0 ? concat(fixed(theirs / ours, 2), "x") : "-"; }

// SGD with momentum over p ranks reads p gradients, the momentum and the parameters once, and writes the latter two.
double limit_seconds(const Medians& ours, int ranks) {
  return (ranks + 4) * ours["parameter_mib"] * (1 << 20) / ours["copy"];
}

void print(const std::vector<Compared>& all, const Options& options) {
  Table steps(
      {"model", "batch", "MiB", "lockstep ms", "DDP ms", "no_sync ms", "DDP/ours", "no_sync/ours", "DDP exchange"});
  Table phases({"model", "forward", "backward", "wait", "update ms", "limit ms", "update at", "update+wait at"});
  Table memory({"model", "lockstep MiB", "above idle", "DDP MiB", "above idle", "saved"});
  for (const auto& [one, ours, theirs] : all) {
    const double exchange = theirs["ddp"] > 0 ? 1 - theirs["no_sync"] / theirs["ddp"] : 0;
    steps.add({one.name, concat(one.batch), fixed(ours["parameter_mib"], 1), milliseconds(ours["step"]),
               milliseconds(theirs["ddp"]), milliseconds(theirs["no_sync"]), times(theirs["ddp"], ours["step"]),
               times(theirs["no_sync"], ours["step"]), concat(fixed(100 * exchange, 0), "%")});
    const double limit = limit_seconds(ours, options.run.ranks);
    phases.add({one.name, milliseconds(ours["forward"]), milliseconds(ours["backward"]), milliseconds(ours["wait"]),
                milliseconds(ours["update"]), milliseconds(limit), concat(fixed(100 * limit / ours["update"], 0), "%"),
                concat(fixed(100 * limit / (ours["update"] + ours["wait"]), 0), "%")});
    memory.add({one.name, fixed(ours["memory_mib"], 0), fixed(ours["memory_mib"] - ours["idle_mib"], 0),
                fixed(theirs["memory_mib"], 0), fixed(theirs["memory_mib"] - theirs["idle_mib"], 0),
                theirs["memory_mib"] > 0 ? concat(fixed(100 * (1 - ours["memory_mib"] / theirs["memory_mib"]), 0), "%")
                                         : "-"});
  }
  std::cout << "A step, SGD with momentum, " << options.run.ranks << " ranks x 1 thread; medians of "
            << options.run.steps << " steps, then of " << options.turns << " turns\n"
            << machine() << "\n\n";
  steps.print(std::cout);
  std::cout
      << "\nWhere lockstep's step goes. limit: bytes that must move at the speed of memcpy by all ranks at once\n";
  phases.print(std::cout);
  std::cout << "\nMemory: the sum of PSS over the ranks\n";
  memory.print(std::cout);
}

void keep(const std::vector<Compared>& all, const Options& options) {
  if (options.json.empty()) return;
  nlohmann::ordered_json json{{"ranks", options.run.ranks}, {"turns", options.turns}, {"steps", options.run.steps}};
  for (const auto& [one, ours, theirs] : all)
    json["models"][one.name] = {{"lockstep", ours.to_json()}, {"pytorch", theirs.to_json()}};
  save(options.json, json);
}

std::vector<StepCase> chosen_cases(const Options& options) {
  std::vector<StepCase> chosen;
  for (const StepCase& one : step_cases())
    if (options.models.empty() || std::ranges::count(options.models, one.name) > 0) chosen.push_back(one);
  return chosen;
}

std::vector<std::string> names() {
  std::vector<std::string> names;
  for (const StepCase& one : step_cases()) names.push_back(one.name);
  return names;
}

}  // namespace

int bench_step(int argc, const char* const* argv) {
  Options options;
  bool separate = false;
  CLI::App app("A data-parallel training step beside PyTorch's DistributedDataParallel over Gloo, in turn.",
               "lockstep bench step");
  app.add_option("--models", options.models, "which of them; all by default")
      ->check(CLI::IsMember(names()))
      ->delimiter(',');
  app.add_option("--ranks", options.run.ranks, "ranks of one thread each")
      ->check(CLI::Range(1, 64))
      ->capture_default_str();
  app.add_option("--steps", options.run.steps, "steps per turn")->check(CLI::Range(1, 10000))->capture_default_str();
  app.add_option("--turns", options.turns, "how often each system runs")
      ->check(CLI::Range(1, 100))
      ->capture_default_str();
  app.add_flag("--separate-parameters", separate, "lockstep with share_parameters = false: buckets and private copies");
  app.add_option("--virtual-shards", options.run.virtual_shards, "lockstep with these; 0: none")->capture_default_str();
  app.add_option("--json", options.json, "also write the medians to this file");
  if (const auto exit_code = parse(app, argc, argv)) return *exit_code;
  options.run.share_parameters = !separate;
  const std::string missing = why_no_python("torch, numpy");
  if (!missing.empty()) std::cout << "PyTorch is not measured: " << missing << "\n";
  std::vector<Compared> all;
  for (const StepCase& one : chosen_cases(options)) all.push_back(compare(one, options, missing.empty()));
  print(all, options);
  keep(all, options);
  return 0;
}

}  // namespace lockstep::bench
