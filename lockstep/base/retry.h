// SPDX-License-Identifier: Apache-2.0
// base/retry.h: the one loop that waits for what another process does, where nothing tells when it has been done.
#pragma once

#include <algorithm>
#include <thread>

#include "lockstep/deadline.h"

namespace lockstep {

// Calls `attempt` until its result counts as true, the last time after the deadline. Pauses double, from 1 ms to
// `longest_pause`. Returns the last result.
template <class Attempt>
auto retry(const Deadline& deadline, milliseconds longest_pause, const Attempt& attempt) {
  for (milliseconds pause{1};; pause = std::min(2 * pause, longest_pause)) {
    const bool is_last = deadline.passed();
    auto result = attempt();
    if (result || is_last) return result;
    std::this_thread::sleep_for(std::min(pause, deadline.left()));
  }
}

}  // namespace lockstep
