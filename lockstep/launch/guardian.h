// SPDX-License-Identifier: Apache-2.0
// launch/guardian.h: a small process that kills a launcher's ranks, and what they started, if the launcher is killed.
//
// Each rank dies with the launcher by itself (PR_SET_PDEATHSIG), but what a rank started does not. The guardian waits
// for the launcher's end on a pidfd, and reads the ranks' process groups from memory it shares with them.
//
// Owns:    one process and one shared page; the destructor ends the process and waits for it
// Threads: main thread, before any other is started (it forks)
#pragma once

#include <sys/types.h>

#include <atomic>
#include <span>

#include "lockstep/base/to_size.h"

namespace lockstep {

class Guardian {
 public:
  explicit Guardian(int ranks);  // throws SystemError
  ~Guardian();
  Guardian(const Guardian&) = delete;
  Guardian& operator=(const Guardian&) = delete;

  // Where rank `index` writes its process group; 0 until then.
  std::atomic<pid_t>* group(int index) { return &groups_[to_size(index)]; }

 private:
  std::span<std::atomic<pid_t>> groups_;  // shared with the guardian and the ranks
  pid_t pid_ = -1;
};

}  // namespace lockstep
