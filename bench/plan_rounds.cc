// SPDX-License-Identifier: Apache-2.0
#include "bench/plan_rounds.h"

#include <functional>
#include <numeric>

#include "bench/plan_yardstick.h"
#include "lockstep/base/median.h"
#include "lockstep/base/text.h"
#include "lockstep/error.h"
#include "tools/plan/builder.h"
#include "tools/plan/measure.h"
#include "tools/plan/measured_steps.h"

namespace lockstep::bench {
namespace {

plan::Profile profile_of(const PlanCase& one) {
  show_progress(concat(one.model, ": profile"));
  return plan::measure(subject_of(one));
}

plan::Target target_of(const PlanCase& one, const MeasuredLink& link, int cores) {
  plan::Target target{.devices = one.devices, .batch = one.batch};
  if (one.hosts == 1) return target;
  target.machines = one.hosts;
  target.cores = std::max(1, cores / one.hosts);
  target.link_rate = one.link_mbit * 1e6 / 8;
  target.link_latency = link.latency;
  return target;
}

// The hosts are network namespaces on this machine. All of them together have its cores, on which each device has a seat.
plan::Schedule on_this_machine(plan::Schedule hosts, const plan::Profile& profile, const plan::Target& target) {
  const plan::Target together{.devices = target.machines * target.devices, .batch = target.batch};
  const plan::Schedule here = plan::schedule(profile, together, {.kind = StrategyKind::kDdp}, /*steps=*/0);
  auto& resources = hosts.simulation.resources;
  plan::Ids place(resources.size());  // of each resource
  std::iota(place.begin(), place.end(), 0);
  for (const int cores : hosts.cores) place[cores] = hosts.cores.front();
  for (int i = 0; i < hosts.seats.size(); ++i) place[hosts.seats[i]] = hosts.seats[i % profile.cores];
  resources[hosts.cores.front()] = here.simulation.resources[here.cores.front()];
  for (plan::Activity& activity : hosts.simulation.activities)
    for (int& resource : activity.uses) resource = place[resource];
  return hosts;
}

double forecast_step(const plan::Profile& profile, const plan::Target& target, const plan::Choice& choice) {
  plan::Schedule made = plan::schedule(profile, target, choice, plan::steps_for(choice));
  if (target.machines > 1) made = on_this_machine(std::move(made), profile, target);
  return plan::seconds_of_step(choice, made, made.simulation.run());
}

// Messages take what they take over loopback, and what shaping and carrying their bytes takes more.
plan::Profile with_link(plan::Profile profile, const MeasuredLink& link) {
  for (plan::SizedTime& each : profile.loopback_work) {
    const plan::MessageBytes wire = plan::bytes_on_wire(each.bytes);
    each.seconds += 2 * link.work_of_byte * (wire.there + wire.back);
  }
  return profile;
}

// The profile of a machine that computes slower by that factor.
plan::Profile slower_by(double factor, plan::Profile profile) {
  for (plan::Curve& curve : profile.curves)
    for (plan::StepTimes& point : curve.points) plan::scale(point, factor);
  return profile;
}

// How fast devices are by themselves is measured with the profile and again with the case. A forecast uses nothing else of the case.
PlanResult result_of(const CaseInRound& found, const plan::Profile& measured) {
  const PlanCase& one = found.one;
  const plan::Profile profile = with_link(measured, found.link);
  const plan::Target target = target_of(one, found.link, profile.cores);
  PlanResult result{.one = one, .measured = found.measured, .link = found.link};
  if (const auto then = seconds_when_profiled(profile, one)) result.drift = found.measured.by_itself / *then;
  const plan::Profile drifted = slower_by(result.drift, profile);
  result.undrifted = forecast_step(profile, target, one.choice);
  result.forecast = plan::forecast(drifted, target, one.choice);
  result.forecast.step = forecast_step(drifted, target, one.choice);
  result.forecast.memory = profile.common_bytes + one.hosts * (result.forecast.memory - profile.common_bytes);
  result.step_error = result.forecast.step / found.measured.step - 1;
  return result;
}

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
  take(middle.measured.link_bytes, [](const PlanResult& each) { return each.measured.link_bytes; });
  return middle;
}

Json to_json(const CaseInRound& each) {
  Json json{{"name", each.one.name()}};
  json.update(to_json(each.measured));
  if (each.one.hosts > 1) json["link"] = {{"latency", each.link.latency}, {"work_of_byte", each.link.work_of_byte}};
  return json;
}

CaseInRound case_in(const Json& json, const std::vector<PlanCase>& cases, const std::string& source) {
  const std::string name = json.at("name");
  const auto found = std::ranges::find(cases, name, &PlanCase::name);
  if (found == cases.end()) throw DataError({.what = concat("a case that is not in the list: ", name), .here = source});
  CaseInRound read{.one = *found, .measured = measured_in(json)};
  if (found->hosts > 1)
    read.link = {.latency = json.at("link").at("latency"), .work_of_byte = json.at("link").at("work_of_byte")};
  return read;
}

}  // namespace

// A link is measured for each profile and rate, as no machine keeps its speed for minutes.
PlanRound measure_round(const std::vector<PlanCase>& cases) {
  PlanRound round;
  std::map<int, MeasuredLink> links;  // by their rate
  for (const PlanCase& one : cases) {
    if (!round.profiles.contains(one.model)) {
      round.profiles[one.model] = profile_of(one);
      links.clear();
    }
    const auto [link, is_new] = links.try_emplace(one.link_mbit);
    if (is_new) link->second = measure_link(one);
    show_progress(one.name());
    round.cases.push_back(
        {.one = one, .measured = measure_case(one, round.profiles[one.model].cores), .link = link->second});
  }
  show_progress("");
  return round;
}

Json to_json(const PlanRound& round) {
  Json json;
  for (const auto& [model, profile] : round.profiles) json["profiles"][model] = Json::parse(plan::text_of(profile));
  for (const CaseInRound& each : round.cases) json["cases"].push_back(to_json(each));
  return json;
}

PlanRound round_in(const Json& json, const std::string& source) try {
  std::vector<PlanCase> cases = plan_cases();
  for (const PlanCase& one : plan_cases_of_hosts()) cases.push_back(one);
  PlanRound round;
  for (const auto& [model, profile] : json.at("profiles").items()) {
    round.profiles[model] = plan::profile_in(profile.dump(), concat(source, ", profile of ", model));
    plan::require_possible_numbers(round.profiles[model], source);
  }
  for (const Json& each : json.at("cases")) {
    round.cases.push_back(case_in(each, cases, source));
    static_cast<void>(json.at("profiles").at(round.cases.back().one.model));  // throws where there is none
  }
  return round;
} catch (const Json::exception& error) {
  throw DataError({.what = concat("no measurements of lockstep bench plan: ", error.what()), .here = source});
}

PlanResults results_of(const std::vector<PlanRound>& rounds) {
  PlanResults results;
  for (size_t i = 0; i < rounds.front().cases.size(); ++i) {
    PlanResults all;
    for (const PlanRound& round : rounds) {
      const CaseInRound& found = round.cases.at(i);
      all.push_back(result_of(found, round.profiles.at(found.one.model)));
    }
    results.push_back(middle_of(all));
  }
  return results;
}

}  // namespace lockstep::bench
