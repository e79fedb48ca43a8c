// collective/shm/copy.h: memcpy that takes null pointers where there is nothing to copy, and memory onto itself.
//
// Threads: any
// Ranks:   no communication
#pragma once

#include <cstddef>
#include <cstring>

namespace lockstep::shm {

inline void copy_bytes(std::byte* to, const std::byte* from, std::size_t bytes) {
  if (bytes > 0 && to != from) std::memcpy(to, from, bytes);
}

}  // namespace lockstep::shm
