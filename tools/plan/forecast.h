// SPDX-License-Identifier: Apache-2.0
// tools/plan/forecast.h: what a step of each strategy will take: time, what bounds it, bytes, memory; and which one to choose.
//
// Flow:    Profile, Target -> forecast_all() -> `lockstep plan`, tools/plan/auto.h, `lockstep bench plan`
// Threads: values
// Ranks:   no communication
#pragma once

#include "lockstep/observe/timeline_file.h"
#include "tools/plan/schedules.h"

namespace lockstep::plan {

struct Forecast {
  Choice choice;
  double step = 0;           // seconds of a global batch
  double uncertain = 0;      // by so much more or less, as a share: from the measured spread of single steps
  std::string not_measured;  // what of it the profile has not seen: samples, links and so on; empty: nothing
  std::string bound;         // "computing 93 %", of the time of the critical path
  double link_bytes = 0;     // in a step, on the busiest link in one direction
  double memory = 0;         // bytes of a machine, all processes
  double epochs = 0;         // seconds of the target's epochs; 0: the dataset's size is not known
};

// Of one of choices_for(). Throws UsageError: a target that can't be.
Forecast forecast(const Profile& profile, const Target& target, const Choice& choice);

// The steps that a forecast simulates, and the mean over those that do not warm up.
int steps_for(const Choice& choice);
double seconds_of_step(const Choice& choice, const Schedule& schedule, const Outcome& outcome);

// Forecasts of every choice that the target allows, the fastest first.
std::vector<Forecast> forecast_all(const Profile& profile, const Target& target);

struct Scaled {
  int cores, ranks;  // ranks: or device threads
  Forecast forecast;
};

// On one machine: single, each division of ddp, and the fastest of each other exact strategy without servers.
std::vector<Scaled> forecast_scaling(const Profile& profile, Target target, const std::vector<int>& cores);

// Takes forecasts of one target, those that compute the same as one device (inexact: all). Returns the simplest of those that take
// at most 5 % longer than the fastest, as no forecast can tell these apart: fewest servers, then fewest micro-batches.
const Forecast& best_of(const std::vector<Forecast>& forecasts, bool inexact = false);

// One line: why it is that one.
std::string reason(const std::vector<Forecast>& forecasts, bool inexact = false);

// The work of devices, networks and servers in three steps, as a timeline that write_timeline() takes.
Recordings timeline_of(const Profile& profile, const Target& target, const Choice& choice);

}  // namespace lockstep::plan
