// SPDX-License-Identifier: Apache-2.0
// agent/start/events.h: what the launcher waits for, all in one poll(): signals, ends of processes, output.
//
// Threads: one, the only one of its process: a signal may be delivered to any thread that does not block it
#pragma once

#include <poll.h>
#include <signal.h>

#include <functional>
#include <vector>

#include "lockstep/base/files/unique_fd.h"

namespace lockstep {

// During its lifetime SIGINT, SIGTERM and `others`, unless they are ignored, do nothing but become readable from fd(); and
// children that have ended can be waited for, even if this process was started with SIGCHLD ignored.
class SignalReader {
 public:
  explicit SignalReader(const std::vector<int>& others = {});  // throws SystemError
  ~SignalReader();  // signals are as before; what has not been read takes effect
  SignalReader& operator=(SignalReader&&) = delete;

  int fd() const { return fd_.get(); }
  int next() const;                                          // 0: none
  const sigset_t& mask_before() const { return old_mask_; }  // what children start with

 private:
  sigset_t caught_{};
  sigset_t old_mask_{};
  struct sigaction old_child_action_ {};
  UniqueFd fd_;
};

struct Event {
  int fd;
  short events;  // POLLIN or POLLOUT
  std::function<void()> on_ready;
};

// Blocks until a descriptor is ready, then calls the functions of all that are. -1: without a deadline. Throws
// SystemError.
void poll_events(const std::vector<Event>& events, int timeout_ms);

}  // namespace lockstep
