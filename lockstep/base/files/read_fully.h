// SPDX-License-Identifier: Apache-2.0
// base/files/read_fully.h: pread() until everything is read.
//
// Threads: any
#pragma once

#include <unistd.h>

#include <cerrno>
#include <span>

#include "lockstep/base/to_size.h"

namespace lockstep {

// Returns the part of `into` that was not read: none if all is well. Else errno says why; 0: the file ends there. Blocks for
// the disk.
inline std::span<std::byte> read_fully(int fd, size_t at, std::span<std::byte> into) {
  while (!into.empty()) {
    const ssize_t got = ::pread(fd, into.data(), into.size(), static_cast<off_t>(at));
    if (got < 0 && errno == EINTR) continue;
    if (got == 0) errno = 0;
    if (got <= 0) break;
    into = into.subspan(to_size(got));
    at += to_size(got);
  }
  return into;
}

}  // namespace lockstep
