// SPDX-License-Identifier: Apache-2.0
// base/pipe.h: a pipe, both ends of which exec closes.
//
// Owns:    both ends
#pragma once

#include <fcntl.h>
#include <unistd.h>

#include "lockstep/base/files/unique_fd.h"
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

}  // namespace lockstep
