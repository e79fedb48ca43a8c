// SPDX-License-Identifier: Apache-2.0
// collective/machines/chunks.h: how much of an array travels between machines at once.
//
// Threads: values
// Ranks:   all ranks compute the same
#pragma once

#include <algorithm>
#include <cstddef>

#include "lockstep/base/cache_line.h"
#include "lockstep/collective/shm/partition.h"

namespace lockstep {

// Bytes of a chunk of a reduction: an eighth of the array, so that its steps overlap, within limits.
inline std::size_t chunk_bytes(std::size_t bytes) {
  constexpr std::size_t kSmallest = std::size_t{512} << 10;
  constexpr std::size_t kLargest = std::size_t{4} << 20;
  constexpr std::size_t kChunksWanted = 8;
  return std::clamp(bytes / kChunksWanted, kSmallest, kLargest) / kCacheLine * kCacheLine;
}

// Slices of `bytes` bytes. A small array is one slice: more owners would only add messages.
inline int slices_for(std::size_t bytes, int most) {
  constexpr std::size_t kWorthDividing = std::size_t{256} << 10;
  return bytes <= kWorthDividing ? 1 : most;
}

// An array of `count` elements in chunks of `most`; at least one chunk, which may be empty.
struct Chunks {
  std::size_t count;
  std::size_t most;

  std::size_t size() const { return std::max<std::size_t>(1, (count + most - 1) / most); }
  shm::Part operator[](std::size_t chunk) const {
    const std::size_t begin = chunk * most;
    return {begin, std::min(most, count - begin)};
  }
};

// A software pipeline: every stage works on every chunk, in order. In step t stage k works on chunk t - k, so that
// what stage k started for a chunk goes on while the stages work on other chunks; stage k+1 of that chunk then waits
// for it. A chunk's buffers are free again for the chunk that comes as many chunks later as there are stages.
template <class... Stages>
void run_pipeline(std::size_t chunks, const Stages&... stages) {
  for (std::size_t step = 0; step < chunks + sizeof...(stages) - 1; ++step) {
    std::size_t stage = 0;
    const auto take_turn = [&](const auto& work_on) {
      if (stage <= step && step - stage < chunks) work_on(step - stage);
      ++stage;
    };
    (take_turn(stages), ...);
  }
}

}  // namespace lockstep
