// SPDX-License-Identifier: Apache-2.0
// agent/start/process.h: one child process, in a process group of its own, that never outlives the process that started it;
// and the guardian of such groups.
//
// Flow:    launcher -> here -> fork, and exec or a function of this program
// Owns:    the child: the destructor kills its whole group and waits for it
// Threads: start it from the main thread while it is the only one (it forks, and the child dies with that thread)
#pragma once

#include <signal.h>

#include <atomic>
#include <functional>
#include <optional>
#include <set>
#include <span>

#include "lockstep/base/files/unique_fd.h"
#include "lockstep/base/to_size.h"
#include "lockstep/cores.h"
#include "lockstep/deadline.h"

namespace lockstep {

struct ProcessOptions {
  std::vector<std::string> command;                            // PROGRAM ARGS; looked up in PATH
  std::function<int()> body;                                   // runs instead of a command; its result is the exit code
  std::vector<std::pair<std::string, std::string>> variables;  // set in the child's environment
  CoreSet cores;                                               // empty: those of the parent
  int input_fd = -1;                                           // becomes its stdin; -1: /dev/null
  int output_fd = -1;                                          // becomes its stdout; -1: the parent's
  int error_fd = -1;                                           // becomes its stderr; -1: the parent's
  sigset_t signal_mask{};                                      // what it starts with
  std::atomic<pid_t>* group = nullptr;                   // where the child writes its process group before it starts
  std::optional<std::set<int>> keeps;                    // the descriptors above 2 that a body keeps; none: all
  milliseconds start_timeout = std::chrono::minutes(5);  // until its program or body begins
};

std::set<int> all_descriptors();  // of this process

constexpr int kSignalBase = 128;  // a shell's exit code for a signal

struct ExitStatus {
  int exit_code = 0;
  int signal = 0;  // 0: it exited by itself

  int code() const { return signal != 0 ? kSignalBase + signal : exit_code; }
  bool failed() const { return code() != 0; }
};
std::string how_it_ended(const ExitStatus& end);  // "exited with code 2"

class Process {
 public:
  // Returns once the program or body is about to run. Throws SystemError: no such program, a core that may not be used, no
  // processes left, not begun within start_timeout; then nothing is left behind, except in a disk call that can't be killed.
  explicit Process(const ProcessOptions& options);
  ~Process();
  Process(Process&& other) noexcept : pid_(std::exchange(other.pid_, -1)), pidfd_(std::move(other.pidfd_)) {}
  Process& operator=(Process&&) = delete;

  int pid() const { return pid_; }
  int pidfd() const { return pidfd_.get(); }  // readable once it has ended

  // How it ended, or nothing while it runs. Does not wait for it, so its pid stays taken and signal_group stays safe.
  std::optional<ExitStatus> status() const;

  // To it and everything it started that is still in its group.
  void signal_group(int signal) const { ::kill(-pid_, signal); }

 private:
  pid_t pid_ = -1;
  UniqueFd pidfd_;
};

// A small process that kills the process groups of a launcher's ranks if the launcher is killed. A rank dies with the launcher by
// itself (PR_SET_PDEATHSIG), but what it started does not. The destructor ends it.
class Guardian {
 public:
  explicit Guardian(int ranks);  // throws SystemError
  ~Guardian();
  Guardian& operator=(Guardian&&) = delete;

  // The place where rank `index` writes its process group; 0 until then.
  std::atomic<pid_t>* group(int index) { return &groups_[to_size(index)]; }

 private:
  std::span<std::atomic<pid_t>> groups_;  // shared with the guardian and the ranks
  pid_t pid_ = -1;
};

}  // namespace lockstep
