// SPDX-License-Identifier: Apache-2.0
// tools/plan/schedules.h: what each strategy does in a step, as activities of a simulation: one function for each strategy.
//
// Flow:    Profile, Target, Choice -> schedule() -> Simulation::run() -> tools/plan/forecast.h
// Threads: values
// Ranks:   no communication
#pragma once

#include "tools/plan/profile.h"
#include "tools/plan/simulation.h"
#include "tools/plan/target.h"

namespace lockstep::plan {

struct Schedule {
  Simulation simulation;
  IntVector<Ids> ends;            // [step] the activities with which it ends, one for each device
  IntVector<std::string> actors;  // rows of the timeline; the first ones are the devices
  double sent_bytes = 0;          // of a step, on the busiest link in one direction
  Ids cores;                      // [machine] the resource that all of its devices share
  Ids seats;                      // [device] the core, or cores, to which it is bound
};

// `steps` steps of one of choices_for(), one after the other. Throws UsageError: a target that can't be.
Schedule schedule(const Profile& profile, const Target& target, const Choice& choice, int steps);

// The pieces of each stage: the cut whose slowest stage is as fast as possible.
IntVector<Ids> stages_of(const Profile& profile, int stages);

}  // namespace lockstep::plan
