// SPDX-License-Identifier: Apache-2.0
// agent/start/spares.h: processes that wait to become ranks: they have imported torch and lockstep, which takes a Python program two
// seconds, and sleep.
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
  // program: with its arguments. groups: where each spare writes its process group. Starts nothing yet.
  Spares(const std::vector<std::string>& program, std::vector<std::atomic<pid_t>*> groups);

  // Starts those that are missing. what: with the variables and the signal mask that all ranks have in common. One that has
  // ended by itself is not replaced: the program's Python has no lockstep. Throws SystemError.
  void start(ProcessOptions what);

  // A process that becomes a rank now: it gets the variables, cores and output of `rank`, and runs the program. Nothing: none is
  // there, and the rank is to be started as usual.
  std::optional<Process> take(const ProcessOptions& rank);

  std::vector<int> descriptors() const;  // that a forked child must close

 private:
  struct Spare {
    Process process;
    UniqueFd channel;
    std::atomic<pid_t>* group;
  };
  bool is_used(std::atomic<pid_t>* group) const;
  void start_one(ProcessOptions what);

  std::vector<std::string> command_;
  std::vector<std::atomic<pid_t>*> groups_;
  std::list<Spare> waiting_;
  bool tried_in_vain_ = false;
};

}  // namespace lockstep
