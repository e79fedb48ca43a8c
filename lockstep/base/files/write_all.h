// SPDX-License-Identifier: Apache-2.0
// base/files/write_all.h: write() until everything is written.
//
// Threads: any
#pragma once

#include <unistd.h>

#include <cerrno>
#include <string_view>

#include "lockstep/base/to_size.h"

namespace lockstep {

// False: errno says why, and a part may be written. Blocks as long as the file does.
inline bool write_all(int fd, std::string_view bytes) {
  while (!bytes.empty()) {
    const ssize_t written = ::write(fd, bytes.data(), bytes.size());
    if (written < 0 && errno == EINTR) continue;
    if (written == 0) errno = EIO;
    if (written <= 0) return false;
    bytes.remove_prefix(to_size(written));
  }
  return true;
}

}  // namespace lockstep
