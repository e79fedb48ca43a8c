// SPDX-License-Identifier: Apache-2.0
#include "lockstep/memory.h"

#include <malloc.h>

#include <mutex>

#include "lockstep/base/process/environment_switch.h"

namespace lockstep {

void keep_freed_memory() {
  if (is_switched_off("LOCKSTEP_KEEP_FREED_MEMORY")) return;
  ::mallopt(M_MMAP_THRESHOLD, 1 << 30);
  ::mallopt(M_TRIM_THRESHOLD, -1);
  ::mallopt(M_ARENA_MAX, 1);
}

// One thread at a time: where another malloc replaces glibc's (a sanitizer's, jemalloc's), the first call initialises
// glibc's, which two threads must not do at once.
void give_back_freed_memory() {
  static std::mutex mutex;
  const std::lock_guard lock(mutex);
  ::malloc_trim(0);
}

}  // namespace lockstep
