// SPDX-License-Identifier: Apache-2.0
// tests/killed_update/stepped_child.h: a child process that can be stopped after any number of instructions (ptrace: there are
// no performance counters in a virtual machine).
//
// Owns:    the child, which is killed when this goes
// Threads: the one that made it
#pragma once

#include <signal.h>
#include <sys/prctl.h>
#include <sys/ptrace.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <functional>
#include <stdexcept>

namespace lockstep::testing {

// In the child: the calling thread stops here, and from here on it is stepped until the next call.
inline void stop_for_steps() { ::syscall(SYS_tgkill, ::getpid(), ::gettid(), SIGSTOP); }
inline void begin_steps() {
  if (::ptrace(PTRACE_TRACEME, 0, nullptr, nullptr) != 0) std::_Exit(101);
  stop_for_steps();
}

// The rest of a forked process: the body, never the tests that come after this one.
[[noreturn]] inline void be_child(const std::function<void()>& body) {
  try {
    body();
    std::_Exit(0);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "the child failed: %s\n", error.what());
  }
  std::_Exit(102);
}

class SteppedChild {
 public:
  // body calls begin_steps(), then stop_for_steps() where the steps end, on one of its threads.
  explicit SteppedChild(const std::function<void()>& body) : pid_(::fork()) {
    if (pid_ == 0) {
      ::prctl(PR_SET_PDEATHSIG, SIGKILL);
      be_child(body);
    }
  }
  ~SteppedChild() { kill(); }
  SteppedChild(const SteppedChild&) = delete;
  SteppedChild& operator=(const SteppedChild&) = delete;

  // Until begin_steps().
  void wait_for_begin() {
    int status = 0;
    thread_ = ::waitpid(-1, &status, __WALL);
    if (thread_ < 0 || !WIFSTOPPED(status)) throw std::runtime_error("the child ended before its steps began");
  }

  // One instruction. False: the steps have ended.
  bool step() {
    int status = 0;
    if (::ptrace(PTRACE_SINGLESTEP, thread_, nullptr, nullptr) != 0 || ::waitpid(thread_, &status, __WALL) < 0 ||
        !WIFSTOPPED(status))
      throw std::runtime_error("the child can't be stepped");
    return WSTOPSIG(status) != SIGSTOP;
  }

  void kill() {
    if (pid_ <= 0) return;
    ::kill(pid_, SIGKILL);
    int status = 0;
    if (thread_ > 0 && thread_ != pid_) ::waitpid(thread_, &status, __WALL);
    ::waitpid(pid_, &status, __WALL);
    pid_ = -1;
  }

  pid_t pid() const { return pid_; }

 private:
  pid_t pid_;
  pid_t thread_ = -1;
};

}  // namespace lockstep::testing
