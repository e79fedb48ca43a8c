// SPDX-License-Identifier: Apache-2.0
// bench/plan_measured.h: trains a case of bench/plan_cases.h for some steps and measures it.
//
// Flow:    PlanCase -> processes that train -> MeasuredCase
// Threads: call from the main thread while it is the only one (it forks)
// Ranks:   starts them: of one machine with the launcher, of hosts in network namespaces with shaped links (root only)
#pragma once

#include "bench/harness.h"
#include "bench/plan_cases.h"
#include "tools/plan/profile.h"

namespace lockstep::bench {

struct MeasuredCase {
  double step = 0;        // seconds: the median over windows of steps, of the slowest rank
  double by_itself = 0;   // seconds of a device's forward and backward, between the windows (bench/plan_yardstick.h)
  double memory = 0;      // bytes: what each process has of its own, and once what they share
  double link_bytes = 0;  // of a step, on the busiest link in one direction: frames with all headers; one machine: 0
  double cores_busy = 0;  // seconds of all cores of this machine for a step
  int steps = 0;          // that were timed
};

Json to_json(const MeasuredCase& measured);
MeasuredCase measured_in(const Json& json);  // throws Json::exception

struct MeasuredLink {
  double latency = 0;  // seconds, one way, more than over loopback
  double work_of_byte =
      0;  // seconds of this machine's cores that shaping and carrying a byte takes, more than over loopback
};

// As the case's hosts have them; on one machine there are none.
MeasuredLink measure_link(const PlanCase& one);

// `cores`: of this machine. Blocks until all processes have ended. Throws SystemError: one of them failed, or,
// between hosts, they took too long.
MeasuredCase measure_case(const PlanCase& one, int cores);

}  // namespace lockstep::bench
