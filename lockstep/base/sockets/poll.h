// SPDX-License-Identifier: Apache-2.0
// base/sockets/poll.h: waits for one file descriptor, not beyond a deadline.
#pragma once

#include <poll.h>

#include <cerrno>

#include "lockstep/deadline.h"

namespace lockstep {

// False: not before the deadline. A descriptor whose other end is gone is ready, too: the call that follows says so.
inline bool wait_for(short events, int fd, Deadline deadline) {
  pollfd polled{.fd = fd, .events = events, .revents = 0};
  while (true) {
    const int result = ::poll(&polled, 1, static_cast<int>(deadline.left().count()));
    if (result != 0 && !(result < 0 && errno == EINTR)) return true;
    if (deadline.passed()) return false;
  }
}

}  // namespace lockstep
