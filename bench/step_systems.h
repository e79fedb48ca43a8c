// SPDX-License-Identifier: Apache-2.0
// bench/step_systems.h: the training steps that are compared, six models from small to heavy in parameters, and the systems
// that do them, each as processes of this machine.
//
// Flow:    StepCase, StepRun -> here -> step.cc, scaling.cc
// Threads: one
// Ranks:   it starts them
#pragma once

#include <cstdint>
#include <initializer_list>
#include <map>
#include <string>
#include <vector>

namespace lockstep::bench {

struct StepCase {
  std::string name;    // bench/peers/step.py knows it too
  int64_t batch;       // global
  std::string layout;  // of both systems: contiguous | channels_last
};

const std::vector<StepCase>& step_cases();

using Seconds = std::map<std::string, double>;  // by name

struct StepRun {
  int ranks = 2;
  int threads = 1;  // of each rank
  int warmup = 2;
  int steps = 10;
  bool share_parameters = true;
  int virtual_shards = 0;
  std::string device = "cpu";  // or "cuda": a GPU for each rank
};

// Medians in seconds: step, forward, backward, wait (for the last rank to arrive), update; copy (bytes per second that
// all ranks together read and write in memcpy); idle_mib and memory_mib, sums over the ranks; parameter_mib. On cores also
// operations (floating point, of a step of all ranks), triad (as copy) and sgemm (operations per second): bench/limits.h.
Seconds run_lockstep_step(const StepCase& one, const StepRun& run);

// ddp, no_sync: medians in seconds; idle_mib and memory_mib. With 0 ranks one_process_LAYOUT and one_process_LAYOUT_kept: medians of
// one process, the second one with a malloc that keeps freed memory.
Seconds run_pytorch_step(const StepCase& one, const StepRun& run, int ranks, const std::string& layout);

// The smallest that is not 0, which means: not measured. 0: none was.
double least_measured(const std::vector<double>& all);

}  // namespace lockstep::bench
