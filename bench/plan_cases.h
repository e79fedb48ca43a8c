// SPDX-License-Identifier: Apache-2.0
// bench/plan_cases.h: the cases of `lockstep bench plan`: what is forecast and then measured. The list was written before the
// first forecast was made; those held out are looked at once a change of the planner is finished, and nothing is fitted to
// any of them.
//
// Threads: values
#pragma once

#include <string>
#include <vector>

#include "lockstep/plan/target.h"

namespace lockstep::bench {

struct PlanCase {
  std::string model;
  std::int64_t batch = 1;  // global
  int devices = 1;
  plan::Choice choice;

  std::string name() const;  // "lenet, 2 devices: ddp"
  bool held_out() const;     // half of them, by a hash of the name
};

// On one machine: three models, every strategy, 1, 2 and 4 devices.
std::vector<PlanCase> plan_cases();

}  // namespace lockstep::bench
