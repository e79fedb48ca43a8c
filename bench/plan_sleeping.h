// SPDX-License-Identifier: Apache-2.0
// bench/plan_sleeping.h: training in which forward and backward are replaced by sleeping, so that a machine with few cores can
// stand for more hosts than it has cores. Everything else is real: parameters, gradients, updates, messages.
//
// Threads: as a Task
#pragma once

#include "lockstep/plan/profile.h"
#include "lockstep/task.h"

namespace lockstep::bench {

// Parameters and pieces are those of `task`. Each piece sleeps for as long as it takes a device alone, by the profile; outputs
// and gradients have the shapes of real ones, and are zero. `task` has to allow that it is cut.
Task sleeping_task(const Task& task, const plan::Profile& profile);

}  // namespace lockstep::bench
