// SPDX-License-Identifier: Apache-2.0
// launch/fault.h: LOCKSTEP_FAULT lets a rank be lost at a chosen point of its training, to try out recovery;
// docs/recovery.md lists what it may say.
//
//   LOCKSTEP_FAULT="rank=1,step=7,phase=update,after=1000"   several of them: separated by ;
//
// Flow:    own_progress.h, when the rank enters or leaves a phase -> here -> a signal to this process
// Threads: any
// Ranks:   each by itself. Without the variable a phase costs one load of a global pointer
#pragma once

#include <atomic>

#include "lockstep/launch/job_page.h"

namespace lockstep::fault {

class Plan;
inline std::atomic<Plan*> plan{nullptr};  // null: there are no faults

// Reads LOCKSTEP_FAULT, the first time. Throws UsageError: it can't be read.
void read_plan();

void begin(Plan& faults, Phase phase);  // may not return
void end(Plan& faults, Phase phase);    // may not return

inline void begin(Phase phase) {
  if (Plan* const faults = plan.load(std::memory_order_acquire)) [[unlikely]]
    begin(*faults, phase);
}
inline void end(Phase phase) {
  if (Plan* const faults = plan.load(std::memory_order_acquire)) [[unlikely]]
    end(*faults, phase);
}

// Of these phases faults belong to a part only: to what a During says. Of all others to the whole.
constexpr bool strikes_in_a_part_of(Phase phase) { return phase == Phase::kUpdate || phase == Phase::kOwnCode; }

// That part: of kUpdate once all ranks have agreed on the step, of kOwnCode between two steps of a training loop of ours.
class During {
 public:
  explicit During(Phase phase) : phase_(phase) { begin(phase_); }
  ~During() { end(phase_); }
  During(const During&) = delete;
  During& operator=(const During&) = delete;

 private:
  Phase phase_;
};

}  // namespace lockstep::fault
