// SPDX-License-Identifier: Apache-2.0
// lockstep-compare: `lockstep compare`: trains one model with several strategies, several times, and shows them side by
// side.
#include <algorithm>
#include <iomanip>
#include <iostream>

#include "cli/compare/folder.h"
#include "cli/compare/summary.h"
#include "lockstep/base/command_line.h"
#include "lockstep/base/file.h"
#include "lockstep/base/names.h"
#include "lockstep/base/text.h"
#include "lockstep/cores.h"
#include "lockstep/launch/interfaces.h"

namespace lockstep::compare {
namespace {

struct Request {
  Settings settings{.experiment = "strategies"};
  Words vary;
  std::string links = "auto";
  std::string output;
  double deadline = 3600;  // of a run, seconds
  bool list = false;
};

// ---- the command line

void add_what(CLI::App& app, Request& request) {
  Settings& s = request.settings;
  app.add_option("EXPERIMENT", s.experiment, "which, see below");
  app.add_option("--strategies", s.strategies, "only these, see below")->delimiter(',')->allow_extra_args(false);
  app.add_option("--devices", s.devices, "numbers of devices, such as 1,2,4")
      ->delimiter(',')
      ->allow_extra_args(false)
      ->check(CLI::Range(1, 1000));
  app.add_option("--seeds", s.seeds, "one repeat for each")
      ->delimiter(',')
      ->allow_extra_args(false)
      ->check(CLI::Range(0, 1000000000));
  app.add_option("--vary", request.vary,
                 "OPTION=VALUE,VALUE...: an option of lockstep train, in place of the "
                 "experiment's values or beside what it varies")
      ->allow_extra_args(false);
  app.add_option("--model", s.model, "as lockstep train");
  app.add_option("--data", s.data, "as lockstep train");
  app.add_option("--batch-size", s.batch_size, "global batch")->check(CLI::Range(1, 100000000));
  app.add_option("--threads", s.threads, "of each device")->check(CLI::Range(1, 1000))->capture_default_str();
}

void add_how(CLI::App& app, Request& request) {
  Settings& s = request.settings;
  auto* const budget = app.add_option_group("budget", "of each run: one of these");
  budget->add_option("--epochs", s.budget.epochs, "passes over the data")->check(CLI::Range(1, 1000000));
  budget->add_option("--samples", s.budget.samples, "samples")->check(CLI::Range(1, 2000000000));
  budget->add_option("--steps", s.budget.steps, "batches")->check(CLI::Range(1, 1000000000));
  budget->add_option("--seconds", s.budget.seconds, "seconds of training")->check(CLI::Range(0.1, 1e6));
  budget->require_option(0, 1);
  app.add_option("--links", request.links,
                 "server-vs-ring: shaped: as root, each rank in a network of its own; "
                 "loopback; auto: shaped where it may")
      ->check(CLI::IsMember({"auto", "shaped", "loopback"}))
      ->capture_default_str();
  app.add_option("--rate", s.link.megabits_per_second, "of shaped links, Mb/s in each direction")
      ->check(CLI::Range(0.1, 1e6))
      ->capture_default_str();
  app.add_option("--order-seed", s.order_seed, "of the order in which the runs are made")->capture_default_str();
  app.add_option("--deadline", request.deadline, "seconds after which a run is killed and counts as failed")
      ->check(CLI::Range(0.1, 1e7))
      ->capture_default_str();
  app.add_option("--output", request.output, "folder; compare-EXPERIMENT by default");
  app.add_flag("--trace", s.trace, "write a timeline of each run into its folder");
  app.add_flag("--list", request.list, "only show which runs there would be");
}

std::string help() {
  std::ostringstream text;
  text << "  experiment      what it compares\n";
  for (const Experiment& experiment : experiments())
    text << "  " << std::left << std::setw(16) << experiment.name << experiment.description << '\n';
  text << "\nStrategies: " << join(names_in(contenders()), ", ")
       << ".\nWhat follows -- is given to lockstep train in every run, such as -- --lr 0.1.\n"
          "A comparison that was stopped goes on with the same command.\n";
  return text.str();
}

std::pair<std::string, Words> parse_vary(const std::string& text) {
  const std::size_t equals = text.find('=');
  std::string option = text.substr(0, equals);
  std::ranges::replace(option, '_', '-');
  while (option.starts_with('-')) option.erase(0, 1);
  const Words values = equals == std::string::npos ? Words{} : split(text.substr(equals + 1), ',');
  if (option.empty() || values.empty() || std::ranges::count(values, "") > 0)
    throw UsageError({.what = concat("--vary ", text), .next = "give OPTION=VALUE,VALUE... such as lr=0.05,0.1"});
  return {option, values};
}

// Options of lockstep train that compare gives itself.
void require_free(const std::string& option) {
  static const Words taken{"strategy", "ranks",          "seed",   "metrics",    "epochs",     "max-steps",
                           "config",   "quiet",          "trace",  "threads",    "batch-size", "model",
                           "data",     "checkpoint-dir", "resume", "tensorboard"};
  if (std::ranges::count(taken, option) > 0)
    throw UsageError({.what = concat("--", option, " after --"),
                      .likely = "lockstep compare chooses it for every run",
                      .next = "lockstep compare --help lists its own options; --vary tries several values"});
}

// ---- what the options mean together

void fill_in(Settings& settings, const Experiment& experiment) {
  if (settings.model.empty()) settings.model = experiment.model;
  if (settings.data.empty()) settings.data = experiment.data;
  if (settings.batch_size == 0) {
    settings.batch_size = experiment.batch_size;
    settings.batch_per_device = experiment.batch_per_device;
  }
  if (!settings.budget.given()) settings.budget = experiment.budget;
  if (!settings.devices.empty()) return;
  settings.devices = experiment.devices;
  const int most = std::max<int>(2, static_cast<int>(usable_cores().size()));
  if (settings.devices.empty())
    for (int count = experiment.counts == DeviceCounts::kAll ? most : 1; count <= most; ++count)
      settings.devices.push_back(count);
}

// An option that this experiment varies can't also be fixed.
void require_not_fixed(const CLI::App& app, const Experiment& experiment) {
  for (const Case& one : experiment.cases)
    for (const Varied& varied : one.varied)
      if (app.get_option_no_throw("--" + varied.option) != nullptr && app.count("--" + varied.option) > 0)
        throw UsageError({.what = concat("--", varied.option, ", which ", experiment.name, " varies"),
                          .next = concat("give --vary ", varied.option, "=VALUE,VALUE...")});
}

void choose_links(Request& request) {
  Settings& settings = request.settings;
  std::string why = "--links loopback";
  const bool wanted = request.links != "loopback";
  settings.links = wanted && can_shape_links(settings.link, why) ? Links::kShaped : Links::kLoopback;
  if (settings.links == Links::kShaped) return;
  if (request.links == "shaped")
    throw UsageError({.what = concat("--links shaped, but ", why), .next = "run it as root, or leave --links out"});
  if (address_for_others().empty())
    throw UsageError({.what = concat("hosts with links can't be made here, nor hosts on the loopback device: ", why),
                      .likely = "this machine has no network address, by which ranks of several hosts find each other",
                      .next = "run it as root, with iproute2"});
  std::cerr << "lockstep compare: the ranks are hosts on the loopback device, whose speed is not that of a network: "
            << why << '\n';
}

void read_request(const CLI::App& app, Request& request) {
  const Experiment& experiment = experiment_named(request.settings.experiment);
  for (const std::string& name : request.settings.strategies) static_cast<void>(contender_named(name));
  for (const std::string& text : request.vary) {
    const auto [option, values] = parse_vary(text);
    if (!request.settings.vary.emplace(option, values).second)
      throw UsageError({.what = concat("--vary ", option, " twice"), .next = "give all its values at once"});
  }
  for (const std::string& word : request.settings.train)
    if (word.starts_with("--")) require_free(word.substr(2, word.find('=') - 2));
  require_not_fixed(app, experiment);
  fill_in(request.settings, experiment);
  if (request.settings.budget.seconds >= request.deadline)
    throw UsageError({.what = concat("--seconds ", request.settings.budget.seconds, " is not below --deadline"),
                      .next = "give a larger --deadline: the start of a run takes time, too"});
  if (request.output.empty()) request.output = "compare-" + request.settings.experiment;
  if (experiment.over_hosts) choose_links(request);
  const bool servers = std::ranges::any_of(request.settings.strategies,
                                           [](const auto& name) { return contender_named(name).servers > 0; });
  if (servers && !experiment.over_hosts)
    throw UsageError({.what = "strategies with servers as hosts of their own",
                      .next = "lockstep compare server-vs-ring; elsewhere kvstore-dist_sync"});
}

// ---- the work

void list(const std::vector<Run>& runs) {
  for (const Run& run : runs) std::cout << run.name << "\n    lockstep train " << join(run.arguments, " ") << '\n';
  std::cout << runs.size() << " runs\n";
}

// Nothing has worked so far, and this is a mistake in the options: all the others would fail, too.
void require_usable(const Folder& folder, const Run& run, const Outcome& outcome) {
  if (outcome.exit_code != kUsage || folder.count("finished") > 0) return;
  throw UsageError({.what = concat("lockstep train refuses the first run, ", run.name),
                    .here = concat("lockstep train ", join(run.arguments, " ")),
                    .likely = read_file(folder.of(run) / "output.txt"),
                    .next = "correct the options"});
}

int stopped(const Request& request, const Folder& folder, int signal) {
  std::cerr << "\nlockstep compare: stopped after " << folder.count("finished") << " of " << folder.runs().size()
            << " runs; the same command goes on from " << request.output << '\n';
  return 128 + signal;
}

int train_all(const Request& request, Folder& folder, const StopSignals& signals) {
  int number = 0;
  for (const Run& run : folder.runs()) {
    ++number;
    if (folder.has_finished(run)) continue;
    std::cerr << "[" << number << "/" << folder.runs().size() << "] " << run.name << std::flush;
    const Outcome outcome = train(run, request.settings, {folder.begin(run), request.deadline}, signals);
    if (outcome.stopped_by != 0) return stopped(request, folder, outcome.stopped_by);
    folder.end(run, outcome);
    std::cerr << "  " << human_seconds(outcome.seconds) << (outcome.why.empty() ? "" : "  failed: " + outcome.why)
              << '\n';
    require_usable(folder, run, outcome);
  }
  return folder.count("failed") > 0 ? kFailed : 0;
}

void show_tables(const Request& request, const Folder& folder, const std::vector<Run>& runs) {
  std::ostringstream tables;
  print_summary(tables, request.settings, folder, runs);
  write_file(std::filesystem::path(request.output) / "tables.md", tables.str());
  std::cout << tables.str() << std::flush;
}

int compare(const Request& request, const std::string& command) {
  const std::vector<Run> runs = plan(request.settings, experiment_named(request.settings.experiment));
  if (request.list) {
    list(runs);
    return 0;
  }
  const StopSignals signals;
  Folder folder(request.output, request.settings, command, shuffled(runs, request.settings.order_seed));
  if (const int done = folder.count("finished"); done > 0)
    std::cerr << "lockstep compare: " << done << " of " << runs.size() << " runs are in " << request.output
              << " already\n";
  const int code = train_all(request, folder, signals);
  if (code <= kFailed) show_tables(request, folder, runs);
  return code;
}

int run(int argc, const char* const* argv) {
  Request request;
  CLI::App app("Trains one model with several strategies on several numbers of devices, and shows them side by side.",
               "lockstep compare");
  add_what(app, request);
  add_how(app, request);
  app.footer(help());
  const char* const* const separator =
      std::find_if(argv, argv + argc, [](std::string_view word) { return word == "--"; });
  if (separator != argv + argc) request.settings.train = Words(separator + 1, argv + argc);
  const std::string command = "lockstep compare " + join(Words(argv + 1, argv + argc), " ");
  return parse_and_run(app, static_cast<int>(separator - argv), argv, [&] {
    read_request(app, request);
    return compare(request, command);
  });
}

}  // namespace
}  // namespace lockstep::compare

int main(int argc, char** argv) {
  return lockstep::guarded([&] { return lockstep::compare::run(argc, argv); });
}
