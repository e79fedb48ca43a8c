// SPDX-License-Identifier: Apache-2.0
// `lockstep bench plan`: what `lockstep plan` forecasts beside what is measured: a profile of each model, then every case
// (bench/plan_cases.h) trained for some steps, all in one run, the recommended and the fastest ones once more in turn; on this
// machine, or between hosts that are network namespaces on it.
#include <cmath>
#include <filesystem>
#include <functional>
#include <iostream>
#include <map>

#include "bench/harness.h"
#include "bench/plan_cases.h"
#include "bench/plan_curves.h"
#include "bench/plan_measured.h"
#include "bench/plan_yardstick.h"
#include "lockstep/base/median.h"
#include "lockstep/base/text.h"
#include "lockstep/error.h"
#include "lockstep/launch/environment.h"
#include "lockstep/plan/forecast.h"
#include "lockstep/plan/measure.h"

namespace lockstep::bench {
namespace {

using plan::Forecast;

struct PlanOptions {
  std::vector<std::string> models;
  std::vector<int> hosts;
  std::vector<int> link_mbit{100, 1000};
  bool held_out = false;
  int rounds = 3;
  bool curves = false;
  std::string profiles;  // folder
};

// ---- Forecasts beside measurements

struct PlanResult {
  PlanCase one;
  Forecast forecast;
  MeasuredCase measured;
  MeasuredLink link;
  double drift = 1;       // by how much the machine was slower than for the profile
  double undrifted = 0;   // seconds of a step that are forecast without that
  double step_error = 0;  // as the next ones
  double memory_error() const { return forecast.memory / measured.memory - 1; }
  double link_error() const { return forecast.link_bytes / measured.link_bytes - 1; }
  bool between_hosts() const { return one.hosts > 1; }
  int all_devices() const { return one.hosts * one.devices; }
};
using PlanResults = std::vector<PlanResult>;

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
double measured_loss(const PlanCase& chosen, const PlanCase& fastest, int cores, int rounds) {
  if (chosen.name() == fastest.name()) return 0;
  show_progress(concat(chosen.name(), " and ", fastest.choice.name(), " in turn"));
  Turns of_chosen, of_fastest;
  for (int round = 0; round < rounds; ++round) {
    of_chosen.push_back(measure_case(chosen, cores).step);
    of_fastest.push_back(measure_case(fastest, cores).step);
  }
  return median_ratio(of_chosen, of_fastest) - 1;
}

// Of every model and target: how much slower the recommended choice is than the fastest, if the machine had always been as fast
// as for the profile.
void compare_choices(const PlanResults& results, int cores, int rounds, Json& json) {
  Table table({"model, target", "recommended", "fastest", "slower by"});
  std::map<std::string, PlanResults> targets;
  for (const PlanResult& each : results)
    if (each.all_devices() > 1 && each.one.choice.exact()) targets[each.one.target()].push_back(each);
  int good = 0;
  for (const auto& [name, all] : targets) {
    const PlanCase& chosen =
        std::ranges::min_element(all, {}, [](const PlanResult& each) { return each.undrifted; })->one;
    const PlanCase& fastest = std::ranges::min_element(all, {}, [](const PlanResult& each) {
                                return each.measured.step * each.undrifted / each.forecast.step;
                              })->one;
    const double loss = measured_loss(chosen, fastest, cores, rounds);
    if (loss <= 0.05) ++good;
    table.add({name, chosen.choice.name(), fastest.choice.name(), percent(loss, 1)});
    json["choices"].push_back({{"target", name},
                               {"recommended", chosen.choice.name()},
                               {"fastest", fastest.choice.name()},
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

Json to_json(const PlanResult& each) {
  Json json{{"name", each.one.name()},
            {"held_out", each.one.held_out()},
            {"forecast_seconds", each.forecast.step},
            {"uncertain", each.forecast.uncertain},
            {"bound", each.forecast.bound},
            {"drift", each.drift},
            {"measured_seconds", each.measured.step},
            {"measured_steps", each.measured.steps},
            {"forecast_memory", each.forecast.memory},
            {"measured_memory", each.measured.memory}};
  if (each.between_hosts()) {
    json["forecast_link_bytes"] = each.forecast.link_bytes;
    json["measured_link_bytes"] = each.measured.link_bytes;
    json["link_latency"] = each.link.latency;
    json["link_work_of_byte"] = each.link.work_of_byte;
  }
  return json;
}

void print_cases(const PlanResults& results, Json& json) {
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
    json["cases"].push_back(to_json(each));
  }
  table.print(std::cout);
}

// ---- The cases

std::vector<PlanCase> cases_for(const PlanOptions& options) {
  std::vector<PlanCase> cases = options.hosts.empty() ? plan_cases() : plan_cases_of_hosts();
  std::erase_if(cases, [&](const PlanCase& one) {
    const bool is_wanted = (options.models.empty() || std::ranges::count(options.models, one.model) > 0) &&
                           (one.hosts == 1 || (std::ranges::count(options.hosts, one.hosts) > 0 &&
                                               std::ranges::count(options.link_mbit, one.link_mbit) > 0));
    return !is_wanted || (one.held_out() && !options.held_out);
  });
  return cases;
}

plan::Profile profile_of(const PlanCase& one, const PlanOptions& options) {
  show_progress(concat(one.model, ": profile"));
  const plan::Profile profile = plan::measure(subject_of(one));
  if (!options.profiles.empty())
    plan::save_profile(std::filesystem::path(options.profiles) / (one.model + ".json"), profile);
  return profile;
}

// The hosts share this machine's cores and memory.
plan::Target target_of(const PlanCase& one, const MeasuredLink& link) {
  plan::Target target{.devices = one.devices, .batch = one.batch, .servers = one.choice.servers};
  if (one.hosts == 1) return target;
  target.machines = one.hosts;
  target.on_one_machine = true;
  target.link_rate = one.link_mbit * 1e6 / 8;
  target.link_latency = link.latency;
  target.work_of_link_byte = link.work_of_byte;
  return target;
}

// What computing takes on a machine that is slower by that factor.
plan::Profile slower_by(double factor, plan::Profile profile) {
  for (plan::Curve& curve : profile.curves)
    for (plan::StepTimes& point : curve.points) plan::scale(point, factor);
  for (plan::CompressionTimes& each : profile.compression)
    for (double* const part : {&each.encode, &each.decode}) *part *= factor;
  profile.loss *= factor;
  return profile;
}

// How fast devices are by themselves is measured with the profile and again with the case. Of the case nothing else is used.
PlanResult result_of(const PlanCase& one, const plan::Profile& profile, const MeasuredLink& link) {
  show_progress(one.name());
  const plan::Target target = target_of(one, link);
  PlanResult result{.one = one, .measured = measure_case(one, profile.cores), .link = link};
  if (const auto then = seconds_when_profiled(profile, one)) result.drift = result.measured.by_itself / *then;
  result.undrifted = plan::forecast(profile, target, one.choice).step;
  result.forecast = plan::forecast(slower_by(result.drift, profile), target, one.choice);
  result.step_error = result.forecast.step / result.measured.step - 1;
  return result;
}

// The medians of several rounds.
PlanResult middle_of(const PlanResults& rounds) {
  PlanResult middle = rounds.front();
  const auto take = [&](double& figure, const std::function<double(const PlanResult&)>& of) {
    std::vector<double> all;
    for (const PlanResult& each : rounds) all.push_back(of(each));
    figure = median(all);
  };
  take(middle.undrifted, [](const PlanResult& each) { return each.undrifted; });
  take(middle.step_error, [](const PlanResult& each) { return each.step_error; });
  take(middle.forecast.step, [](const PlanResult& each) { return each.forecast.step; });
  take(middle.forecast.memory, [](const PlanResult& each) { return each.forecast.memory; });
  take(middle.forecast.uncertain, [](const PlanResult& each) { return each.forecast.uncertain; });
  take(middle.drift, [](const PlanResult& each) { return each.drift; });
  take(middle.measured.step, [](const PlanResult& each) { return each.measured.step; });
  take(middle.measured.memory, [](const PlanResult& each) { return each.measured.memory; });
  take(middle.link.latency, [](const PlanResult& each) { return each.link.latency; });
  take(middle.link.work_of_byte, [](const PlanResult& each) { return each.link.work_of_byte; });
  take(middle.measured.link_bytes, [](const PlanResult& each) { return each.measured.link_bytes; });
  return middle;
}

// Every round makes its own profiles, with the links beside them, and measures every case once, as no machine keeps its speed for
// minutes.
void run(const Program& program, const PlanOptions& options) {
  const std::vector<PlanCase> cases = cases_for(options);
  std::vector<PlanResults> rounds(cases.size());
  for (int round = 0; round < options.rounds; ++round) {
    plan::Profile profile;
    std::map<int, MeasuredLink> links;  // by their rate
    for (std::size_t i = 0; i < cases.size(); ++i) {
      if (i == 0 || cases[i].model != cases[i - 1].model) {
        profile = profile_of(cases[i], options);
        links.clear();
      }
      const auto [link, is_new] = links.try_emplace(cases[i].link_mbit);
      if (is_new) link->second = measure_link(cases[i]);
      rounds[i].push_back(result_of(cases[i], profile, link->second));
    }
  }
  PlanResults results;
  for (const PlanResults& each : rounds) results.push_back(middle_of(each));
  show_progress("");
  Json json;
  print_cases(results, json);
  const int cores = allotted_cores();
  print_means(results, cores, json);
  compare_choices(results, cores, options.rounds, json);
  if (!options.hosts.empty())
    for (const std::string& line : left_out_of_hosts()) std::cout << line << '\n';
  program.save(json);
}

void run_curves(const Program& program) {
  Json json;
  print_curves(std::cout, json);
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
  program.option("--profiles", options.profiles, "folder to keep the profiles in, for lockstep plan --profile")
      ->check(CLI::ExistingDirectory);
  program.option("--rounds", options.rounds, "medians of so many")->check(CLI::Range(1, 100));
  program.flag("--held-out", options.held_out, "also the half of the cases that is held out");
  program.flag("--curves", options.curves,
               "forecasts beside scaling curves that others have published; measures nothing");
  return program.run(argc, argv, [&] { options.curves ? run_curves(program) : run(program, options); });
}

}  // namespace lockstep::bench
