// collective/machines/machine_chunks.h: how much of a tensor is on its way between machines at once, and in what memory.
//
// Threads: values
// Ranks:   all ranks compute the same
#pragma once

#include <algorithm>
#include <cstddef>

#include "lockstep/base/cache_line.h"
#include "lockstep/collective/shm/group.h"

namespace lockstep {

// An eighth of the tensor, so that the parts of a step overlap, within limits.
inline std::size_t chunk_bytes(std::size_t bytes) {
  constexpr std::size_t kSmallest = std::size_t{512} << 10;
  constexpr std::size_t kLargest = std::size_t{4} << 20;
  constexpr std::size_t kChunksWanted = 8;
  return std::clamp(bytes / kChunksWanted, kSmallest, kLargest) / kCacheLine * kCacheLine;
}

// Few bytes go in one slice: more owners would only add messages.
inline int slices_for(std::size_t bytes, int slices) {
  constexpr std::size_t kWorthDividing = std::size_t{256} << 10;
  return bytes <= kWorthDividing ? 1 : slices;
}

// At least `bytes` bytes that the ranks of the machine can read.
inline std::byte* grown(shm::Group& group, shm::Memory& memory, std::size_t bytes) {
  if (memory.size() < bytes) memory = group.allocate(bytes);
  return memory.data();
}

// What shared memory is told while an array is divided: sums are divided once, between machines.
inline ReduceOp op_inside(ReduceOp op) { return op == ReduceOp::kMean ? ReduceOp::kSum : op; }

}  // namespace lockstep
