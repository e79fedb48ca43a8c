// SPDX-License-Identifier: Apache-2.0
// lockstep-plan: `lockstep plan`: what a step of each strategy will take on given machines, from a profile of the model.
#include <cmath>
#include <iostream>
#include <set>

#include "bench/harness.h"
#include "lockstep/base/command_line.h"
#include "lockstep/base/files/file.h"
#include "lockstep/base/log.h"
#include "lockstep/base/text.h"
#include "lockstep/models.h"
#include "lockstep/train/builtin.h"
#include "lockstep/train/end_process.h"
#include "lockstep/train/options/option_table.h"
#include "tools/plan/forecast.h"
#include "tools/plan/measure.h"

namespace lockstep::plan {
namespace {

using bench::Table;

struct PlanOptions {
  TrainOptions train;
  Target target;
  double link_megabits = 1000;
  double link_microseconds = 100;
  std::string profile;
  bool other_machine = false;
  std::string trace;
  std::string of;
  bool inexact = false;
  std::vector<int> scaling;
};

// The options of `lockstep train` that change what a step takes.
std::vector<Option> training_options(TrainOptions& options) {
  static const std::set<std::string> kTaken = {
      "--model",        "--classes",   "--data",          "--data-dir",      "--augment",   "--epochs",
      "--batch-size",   "--precision", "--layout",        "--optimizer",     "--momentum",  "--nesterov",
      "--weight-decay", "--clip-norm", "--average-parts", "--average-delay", "--average-in"};
  std::vector<Option> all = option_table(options, {.models = model_names(), .datasets = dataset_kinds()});
  std::erase_if(all, [](const Option& option) { return !kTaken.contains(option.name); });
  return all;
}

void add_options(CLI::App& app, PlanOptions& options) {
  const auto add = [&app](const std::string& name, auto& value, const std::string& help) {
    return app.add_option(name, value, help)->capture_default_str();
  };
  const CLI::Range counts(1, kMostDevices), counts_or_none(0, kMostDevices);
  for (const Option& option : training_options(options.train)) option.add(app);
  add("--profile", options.profile,
      "file of the profile: read, or made (20 to 30 s) where there is none; without it one is made");
  app.add_flag("--other-machine", options.other_machine,
               "the profile is of a machine like the target's, not of this one");
  add("--machines", options.target.machines, "machines of the target")->check(counts);
  add("--devices", options.target.devices, "of each machine: ranks, or threads where a strategy has those")
      ->check(counts);
  add("--cores", options.target.cores, "of each machine; 0: as many as the profile's")->check(counts_or_none);
  add("--link-mbit", options.link_megabits, "megabits per second of a machine's link, in each direction")
      ->check(CLI::Range(1e-6, 1e9));
  add("--link-latency-us", options.link_microseconds, "microseconds from machine to machine, one way")
      ->check(CLI::Range(0.0, 1e9));
  add("--servers", options.target.servers, "servers of kvstore dist_*, placed round robin; 0: compares several numbers")
      ->check(counts_or_none);
  app.add_flag("--inexact", options.inexact,
               "also recommend what learns differently from one device: stale gradients, averaged models");
  add("--trace", options.trace, "file (.json) for the timeline of three steps, for ui.perfetto.dev");
  add("--of", options.of, "with --trace: a choice by its name in the table; default: the recommended one");
  auto* const scaling = app.add_option("--scaling", options.scaling,
                                       "forecast one machine of 16,64,... cores, divided into ranks and threads");
  scaling->delimiter(',')->check(CLI::Range(1, 4096));
  for (const char* name : {"--machines", "--devices", "--cores", "--servers", "--inexact", "--trace"})
    scaling->excludes(app.get_option(name));
  app.add_option("--memory-bandwidth", options.target.memory_rate,
                 "with --scaling: GB/s that all its cores read and write; default: as the profile's copy")
      ->check(CLI::PositiveNumber)
      ->needs(scaling);
}

std::string text_of(const DataSource& source) {
  std::string text = source.data;
  if (!source.folder.empty()) text += " in " + source.folder;
  if (!source.augment.empty()) text += ", " + source.augment;
  return text;
}

Profile profile_for(const PlanOptions& options, const Task& task) {
  const Subject subject{.task = fitted_before_fork(task, options.train.source, options.train.classes),
                        .strategy = options.train.strategy,
                        .batch = std::max<int64_t>(1, options.target.batch / options.target.machines),
                        .data_text = text_of(options.train.source),
                        .data = [&options, task] { return load_datasets(options.train.source, task); }};
  if (!options.profile.empty() && std::filesystem::exists(options.profile)) {
    const Profile profile = load_profile(options.profile);
    require_profile_of(profile, subject, options.other_machine);
    return profile;
  }
  if (!options.profile.empty())
    static_cast<void>(AtomicFile(options.profile));  // throws now where it could not be written later
  log_info(concat("measuring ", task.name, " on this machine, 20 to 30 s"));
  const Profile profile = measure(subject);
  if (!options.profile.empty()) save_profile(options.profile, profile);
  return profile;
}

void print_table(const PlanOptions& options, const Profile& profile, const std::vector<Forecast>& all) {
  const Target& target = options.target;
  std::cout << profile.model << "\nprofile of " << profile.machine << "\ntarget: " << target.machines
            << (target.machines == 1 ? " machine x " : " machines x ") << target.devices
            << (target.devices == 1 ? " device" : " devices") << ", a batch of " << target.batch;
  if (target.machines > 1)
    std::cout << ", links of " << fixed(target.link_rate * 8 / 1e6, 0) << " Mb/s and "
              << fixed(target.link_latency * 1e6, 0) << " us";
  std::cout << "\n\n";
  std::vector<std::string> heads{"strategy", "ms/step", "+-", "bound by", "MB/machine"};
  if (target.machines > 1) heads.insert(heads.end() - 1, "link MB/step");
  if (profile.dataset > 0)
    heads.push_back(concat("time of ", target.epochs, target.epochs == 1 ? " epoch" : " epochs"));
  Table table(heads);
  for (const Forecast& each : all) {
    std::vector<std::string> cells{each.choice.name(), fixed(each.step * 1e3, each.step < 0.1 ? 2 : 1),
                                   concat(fixed(100 * each.uncertain, 0), " %"), each.bound};
    if (target.machines > 1) cells.push_back(fixed(each.link_bytes / 1e6, 2));
    cells.push_back(fixed(each.memory / 1e6, each.memory < 1e8 ? 1 : 0));
    if (profile.dataset > 0) cells.push_back(human_seconds(each.epochs));
    table.add(cells);
  }
  table.print(std::cout);
  const Forecast& best = best_of(all, options.inexact);
  std::cout << "\n" << reason(all, options.inexact) << "\n";
  if (target.machines == 1) std::cout << "lockstep train … " << best.choice.arguments(target.all_devices()) << "\n";
  std::cout << "+-: from the spread of single steps in the profile.";
  if (!best.not_measured.empty()) std::cout << " Not measured, so less sure: " << best.not_measured << ".";
  std::cout << "\n";
}

int print_scaling(Target target, const Profile& profile, const std::vector<int>& counts) {
  if (target.memory_rate <= 0) target.memory_rate = std::max(profile.copy_speed, profile.copy_speed_of_all);
  std::cout << profile.model << "\nprofile of " << profile.machine << ", a batch of " << target.batch
            << "\n\nForecast, not measured. Assumed: cores like the profile's, each copies "
            << fixed(profile.copy_speed / 1e9, 1) << " GB/s, all together at most "
            << fixed(target.memory_rate / 1e9, 1)
            << " (--memory-bandwidth);\neach doubling of threads gains what it did there.\nNot known: NUMA nodes, "
               "caches, clocks, "
               "hardware threads, whether computing waits for memory, fewer samples on a rank than "
            << profile.curves.front().points.front().samples << ".\n\n";
  Table table({"cores", "strategy", "ranks x threads", "ms/step", "bound by"});
  for (const auto& [cores, ranks, each] : forecast_scaling(profile, target, counts))
    table.add({concat(cores), each.choice.name(), concat(ranks, " x ", cores / ranks), fixed(each.step * 1e3, 2),
               each.bound});
  table.print(std::cout);
  return 0;
}

const Choice& choice_to_trace(const std::vector<Forecast>& all, const std::string& name, bool inexact) {
  if (name.empty()) return best_of(all, inexact).choice;
  std::vector<std::string> names;
  for (const Forecast& each : all) {
    if (each.choice.name() == name) return each.choice;
    names.push_back(concat("\"", each.choice.name(), "\""));
  }
  throw UsageError({.what = concat("--of \"", name, "\": the target has no such choice"),
                    .next = concat("one of ", join(names, ", "))});
}

int run_plan(PlanOptions options) {
  require_timeline_file(options.trace);
  if (!options.of.empty() && options.trace.empty())
    throw UsageError({.what = "--of without --trace", .next = "name the file"});
  Target& target = options.target;
  target.batch = options.train.loader.batch_size;
  target.epochs = options.train.epochs;
  target.averaging = options.train.strategy.averaging;
  target.link_rate = options.link_megabits * 1e6 / 8;
  target.link_latency = options.link_microseconds * 1e-6;
  target.memory_rate *= 1e9;
  if (!std::isfinite(target.link_rate + target.link_latency + target.memory_rate))
    throw UsageError({.what = "--link-mbit, --link-latency-us or --memory-bandwidth is not a finite number"});
  require_possible(target);
  check_options(options.train);
  if (options.train.strategy.precision == Precision::kFloat16)  // a profile's steps are made without it
    throw UsageError({.what = "lockstep plan with --precision float16", .next = "forecast bfloat16 or float32"});
  const Profile profile = profile_for(options, model_task(options.train.model));
  if (!options.scaling.empty()) return print_scaling(target, profile, options.scaling);
  const std::vector<Forecast> all = forecast_all(profile, target);
  if (!options.trace.empty())
    write_timeline(options.trace, timeline_of(profile, target, choice_to_trace(all, options.of, options.inexact)),
                   /*complete=*/true);
  print_table(options, profile, all);
  return 0;
}

int run(int argc, const char* const* argv) {
  PlanOptions options;
  CLI::App app(
      "Forecasts for every strategy the time of a training step, what bounds it and what it needs, and recommends one. "
      "It measures steps of one device on this machine (docs/planner.md).",
      "lockstep plan");
  add_options(app, options);
  return parse_and_run(app, argc, argv, [&] { return run_plan(options); });
}

}  // namespace
}  // namespace lockstep::plan

int main(int argc, char** argv) { return lockstep::end_process_with(lockstep::plan::run(argc, argv)); }
