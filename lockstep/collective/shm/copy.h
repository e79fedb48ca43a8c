// SPDX-License-Identifier: Apache-2.0
// collective/shm/copy.h: copies between ranks' memory, with plain vector loads and stores.
//
// show_bytes is for memory that a peer reads next and that this rank has shown it before. A store would first have to
// call the line back from the peer's cache, which takes 7 to 27 ns a line, depending on how far the cores are apart; a
// streaming store sends it past both caches, and the peer reads it from memory at full speed.
//
// Not memcpy: for these sizes the C library uses "rep movsb", which some processors execute ten times slower for certain
// offsets of source and destination within their pages, which staging memory and user memory often have.
//
// Threads: any
// Ranks:   no communication
#pragma once

#include <cstddef>
#include <cstring>

#include "lockstep/collective/shm/reduce_kernels.h"
#include "lockstep/collective/shm/thresholds.h"

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

// `to` at a multiple of 64.
inline void show_bytes(std::byte* to, const std::byte* from, std::size_t bytes) {
  if (bytes < kStreamFromBytes) return copy_bytes(to, from, bytes);
  reduce({.sources = {&from, 1}, .destinations = {&to, 1}, .count = bytes, .streamed = 1}, DType::kUInt8,
         ReduceOp::kBitOr);
}

}  // namespace lockstep::shm
