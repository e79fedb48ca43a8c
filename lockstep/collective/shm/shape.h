// collective/shm/shape.h: a number that tells lists of counts apart.
//
// Threads: a value
// Ranks:   equal lists give equal numbers on every rank
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace lockstep::shm {

// 0 for no counts, which means even ones; else FNV-1a over the words, never 0.
inline std::uint64_t shape_of(std::span<const std::size_t> counts) {
  if (counts.empty()) return 0;
  std::uint64_t hash = 0xcbf29ce484222325;
  for (const std::size_t count : counts) hash = (hash ^ count) * 0x100000001b3;
  return hash | 1;
}

}  // namespace lockstep::shm
