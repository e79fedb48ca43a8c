// SPDX-License-Identifier: Apache-2.0
// tools/plan/measure.h: makes a profile: trains the model for some steps on this machine, alone and on all cores at once.
//
// Flow:    Task, its data, StrategyOptions -> measure() -> tools/plan/profile.h
// Owns:    the processes it starts, until it returns
// Threads: call it from the main thread, before there are others (it forks)
// Ranks:   none; it starts ranks of its own
#pragma once

#include "lockstep/strategy.h"
#include "tools/plan/profile.h"

namespace lockstep::plan {

struct Subject {
  Task task;
  StrategyOptions strategy;        // optimizer, clipping, layout and precision count
  int64_t batch = 1;               // of a step, over all devices: the most samples that are measured
  std::string data_text;           // what the profile says its samples are
  std::function<Datasets()> data;  // called in the processes that measure
};

// Names what a profile is of: the names and shapes of all parameters, and what else changes the time of a step.
std::string model_text(const Task& task, const StrategyOptions& strategy);
std::string machine_text();

// Blocks for 20 to 30 s, longer where a single step takes seconds. Throws SystemError: a process that measures has ended (its
// message is on stderr). DataError: a number that can't be was measured.
Profile measure(const Subject& subject);

// Throws UsageError: it is of another model, other data, or (unless `any_machine`) another machine.
void require_profile_of(const Profile& profile, const Subject& subject, bool any_machine);

}  // namespace lockstep::plan
