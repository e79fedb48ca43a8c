// SPDX-License-Identifier: Apache-2.0
// `lockstep bench plan`: what `lockstep plan` forecasts beside what is measured: a profile of each model, then every case
// (bench/plan_cases.h) trained for some steps, all in one run, the recommended and the fastest ones once more in turn; on this
// machine, or between hosts that are network namespaces on it.
#include <cmath>
#include <functional>
#include <iostream>
#include <map>

#include "bench/harness.h"
#include "bench/plan_cases.h"
#include "bench/plan_measured.h"
#include "bench/plan_rounds.h"
#include "lockstep/base/files/file.h"
#include "lockstep/base/text.h"
#include "lockstep/error.h"

namespace lockstep::bench {
namespace {

struct PlanOptions {
  std::vector<std::string> models;
  std::vector<int> hosts;
  std::vector<int> link_mbit{100, 1000};
  bool held_out = false;
  int rounds = 3;
  std::string only;   // part of a case's name
  std::string again;  // file with what was measured before
};

std::string signed_percent(double share, int digits = 0) {
  return concat(share > 0 ? "+" : "", fixed(100 * share, digits), " %");
}

double mean_error(const PlanResults& results, const std::function<double(const PlanResult&)>& error) {
  double sum = 0;
  for (const PlanResult& each : results) sum += std::abs(error(each));
  return results.empty() ? 0 : sum / static_cast<double>(results.size());
}

// By how much steps of the recommended choice take longer than those of the fastest: both are trained again, in turn, as what
// was measured minutes apart differs by itself.
double measured_loss(const PlanCase& chosen, const PlanCase& fastest, int cores) {
  constexpr int kTurns = 3;
  if (chosen.name() == fastest.name()) return 0;
  show_progress(concat(chosen.name(), " and ", fastest.choice.name(), " in turn"));
  Turns of_chosen, of_fastest;
  for (int turn = 0; turn < kTurns; ++turn) {
    of_chosen.push_back(measure_case(chosen, cores).step);
    of_fastest.push_back(measure_case(fastest, cores).step);
  }
  return median_ratio(of_chosen, of_fastest) - 1;
}

// What a step would have taken if the machine had always been as fast as for the profile.
double undrifted_step(const PlanResult& result) {
  return result.measured.step * result.undrifted / result.forecast.step;
}

// As the planner does it, from forecasts without drift.
const PlanResult& recommended(const PlanResults& all) {
  std::vector<plan::Forecast> forecasts;
  for (const PlanResult& each : all) forecasts.push_back({.choice = each.one.choice, .step = each.undrifted});
  const auto place = &plan::best_of(forecasts) - forecasts.data();
  return all[static_cast<size_t>(place)];
}

// Of every model and target: how much slower the recommended choice is than the fastest.
void compare_choices(const PlanResults& results, const std::vector<PlanRound>& rounds, bool again, Json& json) {
  Table table({"model, target", "recommended", "fastest", "slower by"});
  std::map<std::string, PlanResults> targets;
  for (const PlanResult& each : results)
    if (each.all_devices() > 1 && each.one.choice.exact()) targets[each.one.target()].push_back(each);
  int good = 0;
  for (const auto& [name, all] : targets) {
    const PlanResult& chosen = recommended(all);
    const PlanResult& fastest = *std::ranges::min_element(all, {}, undrifted_step);
    const int cores = rounds.back().profiles.at(chosen.one.model).cores;
    const double loss =
        again ? undrifted_step(chosen) / undrifted_step(fastest) - 1 : measured_loss(chosen.one, fastest.one, cores);
    if (loss <= 0.05) ++good;
    table.add({name, chosen.one.choice.name(), fastest.one.choice.name(), percent(loss, 1)});
    json["choices"].push_back({{"target", name},
                               {"recommended", chosen.one.choice.name()},
                               {"fastest", fastest.one.choice.name()},
                               {"slower_by", loss}});
  }
  show_progress("");
  std::cout << "\nThe choice, of those that compute the same as one device\n";
  table.print(std::cout);
  std::cout << "within 5 %: " << good << " of " << targets.size() << "\n";
}

std::string group_of(const PlanResult& result, int cores) {
  const bool crowded = result.all_devices() > cores;
  const std::string held_out = result.one.held_out() ? ", held out" : "";
  if (result.between_hosts()) return (crowded ? "hosts, more than cores" : "hosts, a core for each") + held_out;
  return (crowded ? "more devices than cores" : "a core for each device") + held_out;
}

// Groups in the order of their first cases.
void print_means(const PlanResults& results, int cores, Json& json) {
  std::vector<std::pair<std::string, PlanResults>> groups;
  for (const PlanResult& each : results) {
    const std::string name = group_of(each, cores);
    auto found = std::ranges::find(groups, name, &std::pair<std::string, PlanResults>::first);
    if (found == groups.end()) found = groups.insert(groups.end(), {name, {}});
    found->second.push_back(each);
  }
  Table table({"mean error", "cases", "step", "memory", "link bytes"});
  for (const auto& [name, some] : groups) {
    const double step = mean_error(some, [](const PlanResult&each) { return each.step_error; }),
                 memory = mean_error(some, std::mem_fn(&PlanResult::memory_error));
    const bool links = some.front().between_hosts();
    const double link = links ? mean_error(some, std::mem_fn(&PlanResult::link_error)) : 0;
    table.add({name, concat(some.size()), percent(step, 1), percent(memory, 1), links ? percent(link, 1) : ""});
    json["mean_errors"][name] = {{"cases", some.size()}, {"step", step}, {"memory", memory}};
    if (links) json["mean_errors"][name]["link_bytes"] = link;
  }
  std::cout << '\n';
  table.print(std::cout);
}

void print_cases(const PlanResults& results) {
  std::vector<std::string> heads{"case",        "",      "drift",       "forecast ms", "+-",
                                 "measured ms", "error", "forecast MB", "measured MB", "error"};
  const bool links = std::ranges::any_of(results, &PlanResult::between_hosts);
  if (links) heads.insert(heads.end(), {"forecast link kB", "measured link kB", "error"});
  Table table(heads);
  for (const PlanResult& each : results) {
    std::vector<std::string> cells{each.one.name(),
                                   each.one.held_out() ? "held out" : "",
                                   signed_percent(each.drift - 1),
                                   milliseconds(each.forecast.step),
                                   percent(each.forecast.uncertain),
                                   milliseconds(each.measured.step),
                                   signed_percent(each.step_error),
                                   fixed(each.forecast.memory / 1e6, 0),
                                   fixed(each.measured.memory / 1e6, 0),
                                   signed_percent(each.memory_error())};
    if (links)
      cells.insert(cells.end(), {fixed(each.forecast.link_bytes / 1e3, 1), fixed(each.measured.link_bytes / 1e3, 1),
                                 signed_percent(each.link_error(), 1)});
    table.add(cells);
  }
  table.print(std::cout);
}

// ---- The cases

// With --again all hosts of the file are taken, unless --hosts says which.
bool is_wanted(const PlanCase& one, const PlanOptions& options) {
  const auto among = [](const auto& some, const auto& value) { return std::ranges::count(some, value) > 0; };
  if (one.held_out() && !options.held_out) return false;
  if (!options.models.empty() && !among(options.models, one.model)) return false;
  if (one.hosts > 1 && !among(options.link_mbit, one.link_mbit)) return false;
  if (!options.hosts.empty() && !among(options.hosts, one.hosts)) return false;
  return one.name().find(options.only) != std::string::npos;
}

std::vector<PlanRound> rounds_of(const PlanOptions& options) {
  std::vector<PlanRound> rounds;
  const auto is_left_out = [&](const auto& each) { return !is_wanted(each, options); };
  if (options.again.empty()) {
    std::vector<PlanCase> cases = options.hosts.empty() ? plan_cases() : plan_cases_of_hosts();
    std::erase_if(cases, is_left_out);
    for (int round = 0; round < options.rounds && !cases.empty(); ++round) rounds.push_back(measure_round(cases));
  } else {
    const Json kept = Json::parse(read_file(options.again), nullptr, /*allow_exceptions=*/false);
    if (!kept.is_object() || !kept.contains("rounds"))
      throw DataError({.what = "no measurements of lockstep bench plan", .here = options.again});
    for (const Json& round : kept["rounds"]) {
      rounds.push_back(round_in(round, options.again));
      std::erase_if(rounds.back().cases, [&](const CaseInRound& each) { return is_left_out(each.one); });
    }
  }
  const auto names_of_cases = [](const PlanRound& round) {
    std::vector<std::string> names;
    for (const CaseInRound& each : round.cases) names.push_back(each.one.name());
    return names;
  };
  for (const PlanRound& round : rounds)
    if (names_of_cases(round) != names_of_cases(rounds.front()))
      throw DataError({.what = "rounds over different cases", .here = options.again});
  if (rounds.empty() || rounds.front().cases.empty())
    throw UsageError({.what = "no case is left", .next = "--only, --models, --hosts and --held-out choose them"});
  return rounds;
}

// Every round makes its own profiles and measures every case once: no machine keeps its speed for minutes.
void run(const Program& program, const PlanOptions& options) {
  const std::vector<PlanRound> rounds = rounds_of(options);
  const PlanResults results = results_of(rounds);
  print_cases(results);
  Json json;
  const int cores = rounds.front().profiles.at(results.front().one.model).cores;
  print_means(results, cores, json);
  compare_choices(results, rounds, !options.again.empty(), json);
  if (!options.hosts.empty())
    for (const std::string& line : left_out_of_hosts()) std::cout << line << '\n';
  for (const PlanRound& round : rounds) json["rounds"].push_back(to_json(round));
  program.save(json);
}

}  // namespace

int bench_plan(int argc, const char* const* argv) {
  PlanOptions options;
  Program program("plan", "Forecasts of lockstep plan beside measurements of the same run, on this machine.", 1);
  program.list("--models", options.models, "only these; all by default")
      ->check(CLI::IsMember({"lenet", "mlp", "gpt-mini"}));
  program
      .list("--hosts", options.hosts,
            "between so many hosts of one device (2, 4, 8), as root, instead of on one machine")
      ->check(CLI::IsMember({2, 4, 8}));
  program.list("--link-mbit", options.link_mbit, "with --hosts: links of so many Mb/s in each direction (100, 1000)")
      ->check(CLI::IsMember({100, 1000}));
  program.option("--only", options.only, "cases with this in their names, such as 'dist_sync, 8 servers'");
  program
      .option("--again", options.again, "forecasts beside the measurements in this file of --json; measures nothing")
      ->check(CLI::ExistingFile);
  program.option("--rounds", options.rounds, "medians of so many")->check(CLI::Range(1, 100));
  program.flag("--held-out", options.held_out, "also the half of the cases that is held out");
  return program.run(argc, argv, [&] { run(program, options); });
}

}  // namespace lockstep::bench
