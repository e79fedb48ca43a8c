// SPDX-License-Identifier: Apache-2.0
// observe/phase_scope.h: a phase of a step, while it lives. One instrument for all who want to know where time goes:
//
//   - the job page, which `lockstep top` and the hang watch read. The phase before goes on afterwards
//   - a trace: a span, and the memory of the process
//   - the caller's sum of seconds
//   - LOCKSTEP_FAULT, which may strike at the beginning and at the end
//
// Flow:    training step, loader, checkpoints -> here -> rank_progress.h, trace.h, fault.h
// Threads: any
// Ranks:   no communication
#pragma once

#include "lockstep/observe/fault.h"
#include "lockstep/observe/rank_progress.h"

namespace lockstep {

class PhaseScope {
 public:
  // span: null: it has the name of the phase. seconds: the sum of its time goes there, unless that is null.
  explicit PhaseScope(Phase phase, const char* span = nullptr, int64_t number = -1, double* seconds = nullptr);
  PhaseScope(Phase phase, double& seconds) : PhaseScope(phase, nullptr, -1, &seconds) {}
  ~PhaseScope();
  PhaseScope& operator=(PhaseScope&&) = delete;

 private:
  Phase phase_;
  Phase before_;
  const char* span_;
  int64_t number_;
  double* seconds_;
  bool is_traced_;
  int64_t began_;
};

// The part of kUpdate and kOwnCode in which a fault strikes: of kUpdate once all ranks have agreed on the step, of kOwnCode
// between two steps of a training loop of lockstep's.
class FaultScope {
 public:
  explicit FaultScope(Phase phase) : phase_(phase) { fault::begin(phase_); }
  ~FaultScope() { fault::end(phase_); }
  FaultScope& operator=(FaultScope&&) = delete;

 private:
  Phase phase_;
};

}  // namespace lockstep
