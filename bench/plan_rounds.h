// SPDX-License-Identifier: Apache-2.0
// bench/plan_rounds.h: what `lockstep bench plan` measures in one round over its cases, and what is forecast from it.
//
// Flow:    bench/plan_cases.h -> measure_round() -> results_of() -> bench/plan.cc, which prints them
// Threads: call it from the main thread while that is the only one (it forks)
// Ranks:   none; the ranks that it starts are gone when it returns
#pragma once

#include <map>
#include <string>
#include <vector>

#include "bench/harness.h"
#include "bench/plan_cases.h"
#include "bench/plan_measured.h"
#include "tools/plan/forecast.h"
#include "tools/plan/profile.h"

namespace lockstep::bench {

struct CaseInRound {
  PlanCase one;
  MeasuredCase measured;
  MeasuredLink link;
};

struct PlanRound {
  std::map<std::string, plan::Profile> profiles;  // by model
  std::vector<CaseInRound> cases;
};

// Profiles, links and every case once. Takes half a minute for each model, and 2 to 15 s for each case.
PlanRound measure_round(const std::vector<PlanCase>& cases);

// All that results_of() needs, and back. Throws DataError: no round, or of cases that are not in the list any more.
Json to_json(const PlanRound& round);
PlanRound round_in(const Json& json, const std::string& source);

// A forecast beside what was measured: medians over rounds.
struct PlanResult {
  PlanCase one;
  plan::Forecast forecast;  // as if it had been made at the speed that the machine had for this case
  MeasuredCase measured;
  MeasuredLink link;
  double drift = 1;       // by how much the machine was slower than for the profile
  double undrifted = 0;   // seconds of a step that are forecast without that
  double step_error = 0;  // as the next ones, a share: +0.1 is 10 % too slow
  double memory_error() const { return forecast.memory / measured.memory - 1; }
  double link_error() const { return forecast.link_bytes / measured.link_bytes - 1; }
  bool between_hosts() const { return one.hosts > 1; }
  int all_devices() const { return one.hosts * one.devices; }
};
using PlanResults = std::vector<PlanResult>;

// Of rounds over the same cases in the same order: at least one of each.
PlanResults results_of(const std::vector<PlanRound>& rounds);

}  // namespace lockstep::bench
