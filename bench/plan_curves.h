// SPDX-License-Identifier: Apache-2.0
// bench/plan_curves.h: forecasts beside scaling curves that others have published. Nothing is measured: a machine with its GPUs
// is one device with the speed that was published for one machine, and what is forecast is the exchange between machines.
//
// Threads: values
#pragma once

#include <ostream>
#include <string>
#include <vector>

#include "bench/harness.h"
#include "lockstep/plan/profile.h"
#include "lockstep/plan/target.h"

namespace lockstep::bench {

struct PublishedScaling {
  int machines = 1;
  double efficiency = 0;  // samples a second, over so many times those of one device or machine
  int servers = 1;
};

struct PublishedCurve {
  std::string model;
  std::string source;
  std::string devices;     // of a machine
  double samples = 0;      // per second, of one machine
  double inside = 1;       // of what its devices do alone: 1 where efficiency is over one machine
  std::int64_t batch = 1;  // of a machine
  double link_gigabits = 1;
  double latency = 0;  // seconds; assumed
  plan::Method method = plan::Method::kDdp;
  std::vector<PublishedScaling> published;
  std::vector<int> forecast_only;  // machines
};

const std::vector<PublishedCurve>& published_curves();

// A machine as one device: forward takes a third of its time, layers take theirs by their multiplications. Nothing but computing
// and links takes time.
plan::Profile profile_of(const PublishedCurve& curve);

// Samples a second on so many machines, over so many times those of one device or machine.
double forecast_efficiency(const PublishedCurve& curve, int machines, int servers);

void print_curves(std::ostream& out, Json& json);

}  // namespace lockstep::bench
