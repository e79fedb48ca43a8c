// SPDX-License-Identifier: Apache-2.0
// bench/step/training.h: the systems that `lockstep bench step` compares, each run as processes of this machine.
//
// Threads: call from the main thread while it is the only one (it forks)
#pragma once

#include <map>
#include <string>

#include "bench/step/cases.h"

namespace lockstep::bench {

using Seconds = std::map<std::string, double>;  // by name

struct StepRun {
  int ranks = 2;
  int warmup = 2;
  int steps = 10;
  bool share_parameters = true;
  int virtual_shards = 0;
};

// Medians in seconds: step, forward, backward, wait (for the last rank to arrive), update; copy (GB/s that all ranks
// together read and write in memcpy); idle_mib and memory_mib, sums of PSS; parameter_mib.
Seconds run_lockstep_step(const StepCase& one, const StepRun& run);

// ddp, no_sync: medians in seconds; idle_mib and memory_mib.
Seconds run_pytorch_step(const StepCase& one, const StepRun& run);

}  // namespace lockstep::bench
