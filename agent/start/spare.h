// SPDX-License-Identifier: Apache-2.0
// agent/start/spare.h: a process that waits to become a rank: it has imported torch and lockstep, which takes two seconds.
//
// Flow:    the launcher's command -> start() -> `python -c ... PROGRAM ARGS`, which imports and waits -> take() -> a rank
// Owns:    the waiting process, until it is a rank or the launcher is gone
// Threads: one
#pragma once

#include "agent/start/process.h"

namespace lockstep {

// How a spare of this program is started; empty: it is no Python program with a file or a module, so there is no spare.
std::vector<std::string> spare_command(const std::vector<std::string>& program);

class Spare {
 public:
  // what: of all ranks. group: where the spare writes its process group. Starts nothing yet.
  Spare(ProcessOptions what, std::atomic<pid_t>* group);

  // Starts one, unless it is there. One that has ended by itself is not replaced: the program's Python has no lockstep. Throws
  // SystemError.
  void start();

  // The process, which becomes a rank now, with its variables, cores and output, and runs the program. Nothing: none is there.
  std::optional<Process> take(const ProcessOptions& rank);

 private:
  ProcessOptions what_;  // without a command: there is no spare
  std::optional<Process> process_;
  UniqueFd channel_;
};

}  // namespace lockstep
