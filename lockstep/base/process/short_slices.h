// SPDX-License-Identifier: Apache-2.0
// base/process/short_slices.h: for threads that move data. Where threads that compute keep all cores busy, Linux lets a
// thread run as soon as its data are there if it asked for short slices of a core. Otherwise it waits until a slice of the
// others ends, milliseconds later. docs/design/exchange.md says what that gains.
#pragma once

#include <future>

namespace lockstep {

// This thread asks, also for those that it starts from now on. Nothing changes for a thread with another policy than the
// usual one, before Linux 6.12, and where sched_setattr(2) is not allowed.
void ask_for_short_slices();

// Calls make() on a thread with short slices, which the threads that it starts then have, too. Returns and throws what make() does.
auto with_short_slices(auto make) {
  return std::async(std::launch::async,
                    [&] {
                      ask_for_short_slices();
                      return make();
                    })
      .get();
}

}  // namespace lockstep
