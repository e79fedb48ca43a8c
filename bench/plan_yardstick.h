// SPDX-License-Identifier: Apache-2.0
// bench/plan_yardstick.h: how fast devices are by themselves, without exchange: measured with a profile, and again beside each case,
// as no machine keeps its speed for minutes.
//
// Threads: call from the thread that trains
// Ranks:   all of a case call the same; some of them have a yardstick
#pragma once

#include <optional>

#include "bench/plan_cases.h"
#include "lockstep/world.h"
#include "tools/plan/measured_steps.h"

namespace lockstep::bench {

// As many devices as there are cores, at the same time, if the case has at least as many ranks or its devices are threads; else
// one.
struct YardstickPlan {
  int ranks = 1;    // the first workers
  int devices = 1;  // threads of each
};
YardstickPlan yardstick_for(const PlanCase& one, int cores);

class Yardstick {
 public:
  // A server is no worker.
  Yardstick(const PlanCase& one, int cores, const World& world, std::optional<int> worker, const Datasets& data);

  // Seconds of forward and backward of a device of the case. All ranks call it. Blocks for half a second, or for one step.
  double seconds();

 private:
  double step();

  YardstickPlan plan_;
  const World& world_;
  std::optional<plan::Training> training_;  // of the ranks that have one
  Batch batch_;
  int steps_ = 1;
};

// What it was when the profile was made; nothing if that was not measured, for want of memory.
std::optional<double> seconds_when_profiled(const plan::Profile& profile, const PlanCase& one);

}  // namespace lockstep::bench
