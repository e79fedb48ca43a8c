// SPDX-License-Identifier: Apache-2.0
// collective/trace_if_asked.h: the trace that LOCKSTEP_TRACE asks for, in programs without a Timeline.
//
// Flow:    World::from_env, WorldState::over_store, c10d/backend.cc -> here -> observe/trace.h
// Owns:    the ring's file, which stays for whoever merges it
// Threads: one
// Ranks:   all ranks of the world
#pragma once

#include <functional>
#include <vector>

#include "lockstep/world.h"

namespace lockstep {

// The means by which the ranks of a job compare their clocks.
struct ClockPeers {
  int rank = 0;
  std::vector<int> machine_of;  // of each rank; those of one machine have one clock
  std::function<void(const torch::Tensor&, int to)> send;
  std::function<void(const torch::Tensor&, int from)> receive;  // blocks
};

// Records from here to the end of the process, if LOCKSTEP_TRACE names a file and nothing records yet. Compares clocks, as
// Timeline does. Throws UsageError, SystemError.
void trace_if_asked(const World& world);
void trace_if_asked(const std::function<ClockPeers()>& peers);

}  // namespace lockstep
