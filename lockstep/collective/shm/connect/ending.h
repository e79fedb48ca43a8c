// SPDX-License-Identifier: Apache-2.0
// collective/shm/connect/ending.h: how a process ended, as far as the system tells somebody who is not its parent.
//
// Threads: any
// Ranks:   no communication
#pragma once

#include <sys/types.h>

#include <string>

namespace lockstep::shm {

// "killed by signal 9", "exited with code 3", or "ended" where the system does not say. `pidfd` must be readable.
std::string how_it_ended(int pidfd, pid_t pid);

}  // namespace lockstep::shm
