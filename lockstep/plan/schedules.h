// SPDX-License-Identifier: Apache-2.0
// plan/schedules.h: what each strategy does in a step, as activities of a simulation: one function for each strategy.
//
// Flow:    Profile, Target, Choice -> schedule() -> Simulation::run() -> plan/forecast.h
// Threads: values
// Ranks:   no communication
#pragma once

#include <vector>

#include "lockstep/plan/profile.h"
#include "lockstep/plan/simulation.h"
#include "lockstep/plan/target.h"

namespace lockstep::plan {

// Which part of the measured spread single steps are drawn from.
enum class Luck { kAny, kGood, kBad };

struct Schedule {
  Simulation simulation;
  std::vector<std::vector<int>> ends;  // [step] the activities with which it ends, one for each device
  std::vector<std::string> actors;     // rows of the timeline
  int devices = 0;                     // the first actors are devices
  double sent_bytes = 0;               // of a step, on the busiest link in one direction
  std::vector<int> cores;              // of the resources: those of each machine, then what devices sleep on
  std::vector<int> memory;
  std::vector<int> updates;  // what a machine updates parameters with
  std::vector<int> links;
};

// `steps` steps, one after the other. Throws UsageError: a choice that the target or the profile does not allow.
Schedule schedule(const Profile& profile, const Target& target, const Choice& choice, int steps,
                  Luck luck = Luck::kAny);

// The pieces of each stage: the cut whose slowest stage is as fast as possible.
std::vector<std::vector<int>> stages_of(const Profile& profile, int stages);

}  // namespace lockstep::plan
