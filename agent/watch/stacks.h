// SPDX-License-Identifier: Apache-2.0
// agent/watch/stacks.h: what every thread of another process is in the middle of, as debuggers that are installed show it.
//
// Flow:    a process that hangs -> py-spy (Python), eu-stack or gdb, else /proc -> here -> text for people
// Threads: one that may start processes (agent/start/process.h)
#pragma once

#include <sys/types.h>

#include <string>

#include "lockstep/deadline.h"

namespace lockstep {

// Lines, with the tool that gave them first. Blocks until the tools have answered, at most until the deadline; the process
// stands still while one looks at it. Never throws: what can't be seen is said in the text.
std::string stacks_of(pid_t pid, Deadline deadline);

}  // namespace lockstep
