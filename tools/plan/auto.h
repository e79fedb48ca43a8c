// SPDX-License-Identifier: Apache-2.0
// tools/plan/auto.h: `lockstep train --strategy auto`, in one call.
//
// Threads: call it from the main thread, before there are others (it forks)
// Ranks:   none; it starts ranks of its own
#pragma once

#include "tools/plan/measure.h"

namespace lockstep::plan {

// Measures subject.task for 20 to 30 s and sets subject.strategy to the fastest one that computes the same as one device and needs
// no further processes, such as servers. also_single: one process may have the cores of all devices. Returns a line that says which
// and why. Throws as measure().
std::string choose_strategy(Subject& subject, int devices, bool also_single);

}  // namespace lockstep::plan
