// SPDX-License-Identifier: Apache-2.0
#include "lockstep/observe/phase_scope.h"

#include <algorithm>

#include "lockstep/observe/trace.h"

namespace lockstep {
namespace {

const char* name_of_span(Phase phase) { return std::ranges::find(kNames<Phase>, phase, &Named<Phase>::value)->name; }

// A FaultScope says where faults strike in the other two.
bool has_faults(Phase phase) { return phase != Phase::kUpdate && phase != Phase::kOwnCode; }

// A rank that has met the others, or that trains without any, no longer starts.
Phase after(Phase phase, Phase before) {
  const bool has_started = phase == Phase::kMeeting || (before == Phase::kStarting && phase != Phase::kLoading);
  return has_started ? Phase::kOwnCode : before;
}

}  // namespace

PhaseScope::PhaseScope(Phase phase, const char* span, int64_t number, double* seconds)
    : phase_(phase),
      before_(observe::record().phase.load(std::memory_order_relaxed)),
      span_(span != nullptr ? span : name_of_span(phase)),
      number_(number),
      seconds_(seconds),
      is_traced_(trace::records()) {
  if (is_traced_) trace::count_memory();
  began_ = before_ == phase_ ? trace::now() : observe::enter(phase_);
  if (before_ != phase_ && has_faults(phase_)) fault::begin(phase_);
}

PhaseScope::~PhaseScope() {
  if (before_ != phase_ && has_faults(phase_)) fault::end(phase_);
  const Phase next = after(phase_, before_);
  const int64_t now = next == phase_ ? trace::now() : observe::enter(next);
  if (seconds_ != nullptr) *seconds_ += static_cast<double>(now - began_) * 1e-9;
  if (is_traced_) trace::write(began_, [this] { return trace::Event{.name = span_, .number = number_}; });
}

}  // namespace lockstep
