// SPDX-License-Identifier: Apache-2.0
// bench/plan_cases.h: the cases of `lockstep bench plan`: what is forecast and then measured. The lists were written before the
// first forecast of any of them was made; those held out are looked at once a change of the planner is finished, and nothing is
// fitted to any of them.
//
// Threads: values
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "lockstep/optimizers.h"
#include "tools/plan/measure.h"
#include "tools/plan/target.h"

namespace lockstep::bench {

struct PlanCase {
  std::string model;
  int64_t batch = 1;  // global
  int hosts = 1;
  int link_mbit = 0;  // of each host, in each direction; of one host 0
  int devices = 1;    // of each host
  plan::Choice choice;

  std::string target() const;  // "lenet, 2 devices", "lenet, 4 hosts, 100 Mb/s"
  std::string name() const;    // with the choice: "lenet, 2 devices: ddp"
  bool held_out() const;       // half of them, by a hash of the name
  bool has_device_threads() const { return hosts == 1 && choice.has_device_threads(); }
  int64_t samples_of_device() const { return std::max<int64_t>(1, batch / hosts / devices); }
};

// What all of them train with.
const OptimizerOptions& plan_optimizer();
plan::Subject subject_of(const PlanCase& one);

// On one machine: three models, every strategy, 1, 2 and 4 devices.
std::vector<PlanCase> plan_cases();

// Between hosts of one device each: three models, every strategy that trains over machines, 2, 4 and 8 hosts, links of 100 Mb/s
// and 1 Gb/s.
std::vector<PlanCase> plan_cases_of_hosts();
std::vector<std::string> left_out_of_hosts();  // what is in no case, and why: a line each

}  // namespace lockstep::bench
