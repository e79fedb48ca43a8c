// SPDX-License-Identifier: Apache-2.0
// base/pipe.h: a pipe, both ends of which exec closes; and all that comes out of one, or of a socket.
//
// Owns:    both ends
#pragma once

#include <fcntl.h>

#include <array>
#include <string>

#include "lockstep/base/files/unique_fd.h"
#include "lockstep/base/sockets/poll.h"
#include "lockstep/base/to_size.h"
#include "lockstep/error.h"

namespace lockstep {

struct Pipe {
  UniqueFd out;  // to read from
  UniqueFd in;
};

inline Pipe make_pipe() {
  int ends[2];
  if (::pipe2(ends, O_CLOEXEC) != 0) throw system_error("make", "a pipe");
  return {UniqueFd(ends[0]), UniqueFd(ends[1])};
}

struct ReadToEnd {
  std::string text;
  bool has_ended = false;  // else the deadline came first, or `most` bytes, or an error
};
// Blocks until the other end is closed.
inline ReadToEnd read_to_end_of(int fd, Deadline deadline, size_t most = size_t{1} << 20) {
  ReadToEnd read;
  std::array<char, 4096> buffer;
  while (read.text.size() < most && wait_for(POLLIN, fd, deadline)) {
    const ssize_t bytes = ::read(fd, buffer.data(), buffer.size());
    if (bytes < 0 && (errno == EINTR || errno == EAGAIN)) continue;
    read.has_ended = bytes == 0;
    if (bytes <= 0) break;
    read.text.append(buffer.data(), to_size(bytes));
  }
  return read;
}

}  // namespace lockstep
