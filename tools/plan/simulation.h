// SPDX-License-Identifier: Apache-2.0
// tools/plan/simulation.h: when each activity of a step begins and ends. An activity waits for others, then works on resources that
// activities share: the cores of a machine, one core, each direction of a link.
//
// Flow:    tools/plan/schedules.h describes a step -> run() -> tools/plan/forecast.h
// Threads: values
// Ranks:   no communication; no torch
//
// Time goes from event to event (an activity begins or ends). Between two events every activity works at a constant speed.
// The resource with the least for each of its users is divided first, evenly; what those users leave of other resources goes
// to the others there. This max-min fairness is close to how TCP's flows share a link and a kernel's run queue shares cores.
// Queues, incast and waiting for the slowest follow from it.
#pragma once

#include <string>

#include "lockstep/base/int_vector.h"

namespace lockstep::plan {

using Ids = IntVector<int>;  // of resources, activities or actors
Ids consecutive(int first, int count);
inline void append(Ids& all, const Ids& more) { all.insert(all.end(), more.begin(), more.end()); }

// Something that activities share: while n of them use it, all together get speed[n-1] units per second; beyond the last
// entry, the last one.
struct Resource {
  std::string name;
  IntVector<double> speed;
};

// The kind of work that the forecast names when it says what bounds a step.
enum class Kind { kWaiting, kComputing, kMemory, kLink };

struct Activity {
  std::string name;
  Kind kind = Kind::kWaiting;
  int actor = -1;    // row of the timeline; below 0: none
  double delay = 0;  // seconds before its work, without any resource
  double work = 0;   // units; each resource of `uses` does all of them
  Ids uses{};        // resources; none: its work takes no time
  Ids after{};       // activities that have to end before it begins
};

struct Times {
  double begin = 0;
  double end = 0;
};

struct Outcome {
  IntVector<Times> activities;  // seconds from the start
  double end = 0;
};

struct Simulation {
  IntVector<Resource> resources;
  IntVector<Activity> activities;

  // Return the id: an index into the vectors above.
  int add(Resource resource);
  int add(Activity activity);

  // Throws UsageError: activities that wait for each other, or take less than nothing or for ever; a resource without speed.
  Outcome run() const;
};

}  // namespace lockstep::plan
