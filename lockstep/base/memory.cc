#include "lockstep/base/memory.h"

#include <malloc.h>

namespace lockstep {

void keep_freed_memory() {
  ::mallopt(M_MMAP_THRESHOLD, 1 << 30);
  ::mallopt(M_TRIM_THRESHOLD, -1);
}

void give_back_freed_memory() { ::malloc_trim(0); }

}  // namespace lockstep
