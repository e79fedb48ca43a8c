// SPDX-License-Identifier: Apache-2.0
// agent/watch/hang_options.h: what a launcher does when all ranks are alive and none moves.
#pragma once

#include "lockstep/base/names.h"
#include "lockstep/deadline.h"

namespace lockstep {

enum class OnHang {
  kRestart,  // the rank that holds up the others is killed; what follows is as for any rank that fails
  kEnd,      // it is killed, and the job ends
  kReport,   // the ranks' stacks are shown, and nothing more
};

template <>
inline constexpr auto kNames<OnHang> = in_order<OnHang>({"restart", "end", "report"});

// docs/recovery.md says why the default is less than the five minutes after which collectives give up.
struct HangOptions {
  milliseconds timeout = std::chrono::minutes(4);  // 0: never
  OnHang then = OnHang::kRestart;
};

}  // namespace lockstep
