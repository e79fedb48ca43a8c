// SPDX-License-Identifier: Apache-2.0
// agent/start/spares.h: processes that wait to become ranks, and have imported torch and lockstep, which takes two seconds.
//
// Flow:    the launcher's command -> start() -> `python -c ... PROGRAM ARGS`, which imports and waits -> take() -> a rank
// Owns:    the waiting processes, until they are ranks or the launcher is gone
// Threads: one
#pragma once

#include <list>
#include <optional>
#include <string>
#include <vector>

#include "agent/start/process.h"

namespace lockstep {

// How a spare of this program is started; empty: it is no Python program with a file or a module, so there are no spares.
std::vector<std::string> spare_command(const std::vector<std::string>& program);

class Spares {
 public:
  // what: of all ranks. groups: where each spare writes its process group. Starts nothing yet.
  Spares(ProcessOptions what, std::span<std::atomic<pid_t>> groups);

  // Starts those that are missing. One that has ended by itself is not replaced: the program's Python has no lockstep. Throws
  // SystemError.
  void start();

  // A process that becomes a rank now, with its variables, cores and output, and runs the program. Nothing: none is there.
  std::optional<Process> take(const ProcessOptions& rank);

  std::vector<int> descriptors() const;  // that a forked child must close

 private:
  struct Spare {
    Process process;
    UniqueFd channel;
    std::atomic<pid_t>* group;
  };
  void start_one(std::atomic<pid_t>& group);

  ProcessOptions what_;  // without a command: there are no spares
  std::span<std::atomic<pid_t>> groups_;
  std::list<Spare> waiting_;
};

}  // namespace lockstep
