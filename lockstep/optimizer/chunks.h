// SPDX-License-Identifier: Apache-2.0
// optimizer/chunks.h: parameters cut into chunks that fit into the first-level cache, and the share of each rank.
//
// Threads: pure functions
// Ranks:   no communication; every rank cuts the same parameters into the same chunks
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace lockstep {

inline constexpr std::int64_t kMaxRun = 4096;  // elements of a chunk: two buffers of float32 fill a 32 KiB cache

// Elements [begin, begin + count) of a parameter.
struct Chunk {
  std::size_t parameter;
  std::int64_t begin;
  std::int64_t count;
};

// sizes: the elements of each parameter.
std::vector<Chunk> cut_into_chunks(const std::vector<std::int64_t>& sizes);

// The first chunk that `rank` owns; it owns all from there to first_chunk_of(rank + 1). Every rank has 1/ranks of the
// elements, up to a chunk.
std::size_t first_chunk_of(int rank, int ranks, const std::vector<Chunk>& chunks);

}  // namespace lockstep
