// SPDX-License-Identifier: Apache-2.0
// cli/compare/plan.h: the runs of a comparison.
//
// Flow:    Settings and a row of experiments.h -> plan() -> training.h, one run after the other in shuffled()
// Threads: pure functions
#pragma once

#include "cli/compare/experiments.h"

namespace lockstep::compare {

struct Run {
  std::string name;   // of its folder, such as averaging-2-average_every=8-seed1
  std::string group;  // the name without the seed
  int number = 0;     // in the order of the tables
  Contender contender;
  Options varied;  // what the experiment varies, or --vary
  int devices = 1;
  int seed = 1;

  // Of lockstep train; the files that it writes are not in it.
  Words arguments;
};

// Every run, in the order of the tables. A combination that can't be is left out: `single` on two devices, more stages than
// devices. Throws UsageError: a strategy that there is none of, an option given twice, no run left.
std::vector<Run> plan(const Settings& settings, const Experiment& experiment);

std::string key_of(std::string option);  // "average-every" -> "average_every"

// The order in which they are run: the same for the same seed.
std::vector<Run> shuffled(std::vector<Run> runs, std::uint64_t seed);

}  // namespace lockstep::compare
