// SPDX-License-Identifier: Apache-2.0
// tests/held_disk.h: a disk that does not answer, in the program that includes this and the libraries that it loads. While
// $LOCKSTEP_TEST_DISK names a pipe, fsync() waits until somebody opens that to read.
// For one source of a program.
#pragma once

#include <fcntl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdlib>
#include <string>

#include "lockstep/base/files/unique_fd.h"

extern "C" int fsync(int file) {
  const char* const pipe = std::getenv("LOCKSTEP_TEST_DISK");
  if (pipe != nullptr) const lockstep::UniqueFd opened(::open(pipe, O_WRONLY | O_CLOEXEC));
  return static_cast<int>(::syscall(SYS_fsync, file));
}

namespace lockstep::testing {

class HeldDisk {
 public:
  explicit HeldDisk(std::string pipe) : pipe_(std::move(pipe)) {
    ::mkfifo(pipe_.c_str(), 0600);
    ::setenv("LOCKSTEP_TEST_DISK", pipe_.c_str(), 1);
  }
  ~HeldDisk() { ::unsetenv("LOCKSTEP_TEST_DISK"); }
  HeldDisk(const HeldDisk&) = delete;
  HeldDisk& operator=(const HeldDisk&) = delete;

  // From now on.
  void answer() {
    reader_.reset(::open(pipe_.c_str(), O_RDONLY | O_NONBLOCK | O_CLOEXEC));
    ::unlink(pipe_.c_str());
  }

 private:
  std::string pipe_;
  UniqueFd reader_;
};

}  // namespace lockstep::testing
