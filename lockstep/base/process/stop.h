// SPDX-License-Identifier: Apache-2.0
// base/process/stop.h: how the ranks agree to stop (lockstep/stop.h): whoever exchanges something in each step sends
// wants_to_stop() with it, and calls agree_to_stop() on all ranks if any rank has sent true.
//
// Threads: the rank's own
#pragma once

#include "lockstep/stop.h"

namespace lockstep {

inline bool wants_to_stop() { return stop_signal() != 0; }

void agree_to_stop();
bool has_agreed_to_stop();  // unlike stop_requested() it catches no signal

// This rank has others, with whom it has to agree.
void stop_together();

// While one lives, the calling thread is a rank of its own: of run_ranks().
class RankOfThread {
 public:
  RankOfThread();
  ~RankOfThread();
  RankOfThread& operator=(RankOfThread&&) = delete;
};

}  // namespace lockstep
