// SPDX-License-Identifier: Apache-2.0
// observe/fault.h: LOCKSTEP_FAULT lets a rank be lost at a chosen point of its training, to try out recovery;
// docs/recovery.md lists what it may say.
//
// Flow:    PhaseScope, FaultScope -> here -> a signal to this process
// Threads: any
// Ranks:   each by itself. Without the variable a phase costs one load of a global flag
#pragma once

#include <atomic>

#include "lockstep/observe/job_page.h"

namespace lockstep::fault {

inline std::atomic<bool> are_planned{false};  // read_plan() alone changes it

// Reads LOCKSTEP_FAULT, the first time. Throws UsageError: it can't be read.
void read_plan();

void strike(Phase phase, bool at_end);  // may not return

inline void begin(Phase phase) {
  if (are_planned.load(std::memory_order_acquire)) [[unlikely]]
    strike(phase, /*at_end=*/false);
}
inline void end(Phase phase) {
  if (are_planned.load(std::memory_order_acquire)) [[unlikely]]
    strike(phase, /*at_end=*/true);
}

}  // namespace lockstep::fault
