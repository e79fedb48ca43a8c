#include "lockstep/memory.h"

#include <malloc.h>

#include <mutex>

namespace lockstep {

void keep_freed_memory() {
  ::mallopt(M_MMAP_THRESHOLD, 1 << 30);
  ::mallopt(M_TRIM_THRESHOLD, -1);
  ::mallopt(M_ARENA_MAX, 1);
}

// One at a time: where another malloc has taken the place of glibc's (a sanitizer's, jemalloc's), the first call sets
// glibc's up, which two threads must not do at once.
void give_back_freed_memory() {
  static std::mutex mutex;
  const std::lock_guard lock(mutex);
  ::malloc_trim(0);
}

}  // namespace lockstep
