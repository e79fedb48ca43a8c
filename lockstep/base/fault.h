// SPDX-License-Identifier: Apache-2.0
// base/fault.h: LOCKSTEP_FAULT lets a rank be lost at a chosen point of its training, to try out recovery;
// docs/recovery.md lists what it may say.
//
//   LOCKSTEP_FAULT="rank=1,step=7,phase=update,after=1000"   several of them: separated by ;
//
// Flow:    the training step, World -> here -> a signal to this process
// Threads: any
// Ranks:   each by itself. Without the variable a phase costs one load of a global pointer
#pragma once

#include <atomic>
#include <cstdint>

namespace lockstep::fault {

enum class Phase { kMeeting, kLoading, kForward, kBackward, kPublish, kUpdate, kValidation, kSaving, kBetween };

class Plan;
inline std::atomic<Plan*> plan{nullptr};  // null: there are no faults

// Reads LOCKSTEP_FAULT, the first time. Throws UsageError: it can't be read.
void read_plan();

void set_step(Plan& faults, std::int64_t step);
void begin(Plan& faults, Phase phase);  // may not return
void end(Plan& faults, Phase phase);    // may not return

// The phases from here on belong to this step.
inline void set_step(std::int64_t step) {
  if (Plan* const faults = plan.load(std::memory_order_acquire)) [[unlikely]]
    set_step(*faults, step);
}

// The phase from here to the end of the scope.
class During {
 public:
  explicit During(Phase phase) : phase_(phase) {
    if (Plan* const faults = plan.load(std::memory_order_acquire)) [[unlikely]]
      begin(*faults, phase_);
  }
  ~During() {
    if (Plan* const faults = plan.load(std::memory_order_acquire)) [[unlikely]]
      end(*faults, phase_);
  }
  During(const During&) = delete;
  During& operator=(const During&) = delete;

 private:
  Phase phase_;
};

}  // namespace lockstep::fault
