// SPDX-License-Identifier: Apache-2.0
#include "lockstep/memory.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <fstream>

#if !defined(__SANITIZE_THREAD__) && !defined(__SANITIZE_ADDRESS__)  // which have a malloc of their own

namespace lockstep {
namespace {

constexpr size_t kLarge = size_t{64} << 20;

size_t resident_bytes() {
  size_t all = 0, resident = 0;
  std::ifstream("/proc/self/statm") >> all >> resident;
  return resident * static_cast<size_t>(::sysconf(_SC_PAGESIZE));
}

// Tells whether a process that has called keep_freed_memory() keeps what it frees.
bool keeps(const char* told) {
  const pid_t child = ::fork();
  if (child == 0) {
    ::setenv("LOCKSTEP_KEEP_FREED_MEMORY", told, 1);
    keep_freed_memory();
    auto* const memory = static_cast<volatile char*>(std::malloc(kLarge));
    for (size_t i = 0; i < kLarge; i += 4096) memory[i] = 1;
    const size_t before = resident_bytes();
    std::free(const_cast<char*>(memory));
    ::_exit(resident_bytes() + kLarge / 2 < before ? 1 : 0);
  }
  int status = -1;
  ::waitpid(child, &status, 0);
  return status == 0;
}

TEST(Memory, freed_memory_is_kept_unless_the_environment_says_no) {
  EXPECT_TRUE(keeps("1"));
  EXPECT_FALSE(keeps("0"));
}

}  // namespace
}  // namespace lockstep

#endif
