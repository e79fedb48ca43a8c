// SPDX-License-Identifier: Apache-2.0
// base/sockets/poll.h: waits for file descriptors, not beyond a deadline.
#pragma once

#include <poll.h>

#include <cerrno>
#include <span>

#include "lockstep/deadline.h"

namespace lockstep {

inline pollfd to_poll(int fd, short events = POLLIN) { return {.fd = fd, .events = events, .revents = 0}; }

// Returns what poll() does; longest: -1 ms: no limit.
inline int poll_for(std::span<pollfd> polls, milliseconds longest) {
  return ::poll(polls.data(), polls.size(), static_cast<int>(longest.count()));
}

// The same, not beyond the deadline; goes on after a signal.
inline int poll_until(std::span<pollfd> polls, Deadline deadline) {
  while (true) {
    const int result = poll_for(polls, deadline.left());
    const bool again = result < 0 ? errno == EINTR : result == 0 && !deadline.passed();
    if (!again) return result;
  }
}

// False: not before the deadline. A descriptor whose other end is gone is ready, too: the call that follows says so.
inline bool wait_for(short events, int fd, Deadline deadline) {
  pollfd polled = to_poll(fd, events);
  return poll_until({&polled, 1}, deadline) != 0;
}

}  // namespace lockstep
