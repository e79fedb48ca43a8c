// SPDX-License-Identifier: Apache-2.0
// collective/trace_if_asked.h: the trace that LOCKSTEP_TRACE asks for, in programs without a Timeline.
//
// Flow:    World::from_env, WorldState::over_store -> here -> base/trace.h
// Owns:    the ring's file, which stays for whoever merges it
// Threads: one
// Ranks:   all ranks of the world
#pragma once

#include "lockstep/world.h"

namespace lockstep {

// Records from here to the end of the process, if LOCKSTEP_TRACE names a file and nothing records yet. Compares clocks, as
// Timeline does. Throws UsageError, SystemError.
void trace_if_asked(const World& world);

}  // namespace lockstep
