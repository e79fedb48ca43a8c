// collective/shm/copy.h: copies between ranks' memory, with plain vector loads and stores.
//
// Not memcpy: for these sizes the C library uses "rep movsb", which some processors execute ten times slower where
// source and destination lie unluckily to each other within their pages, and staging memory and user memory often do.
//
// Threads: any
// Ranks:   no communication
#pragma once

#include <cstddef>
#include <cstring>

#include "lockstep/collective/shm/reduce_kernels.h"

namespace lockstep::shm {

// Memory onto itself, and null pointers where there is nothing to copy, are fine.
inline void copy_bytes(std::byte* to, const std::byte* from, std::size_t bytes) {
  constexpr std::size_t kSmall = 2048;
  if (bytes == 0 || to == from) return;
  if (bytes < kSmall) {
    std::memcpy(to, from, bytes);
    return;
  }
  reduce({.sources = {&from, 1}, .destinations = {&to, 1}, .count = bytes}, DType::kUInt8, ReduceOp::kBitOr);
}

}  // namespace lockstep::shm
