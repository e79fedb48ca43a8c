// SPDX-License-Identifier: Apache-2.0
#include "lockstep/optimizer/chunks.h"

#include <algorithm>

namespace lockstep {

std::vector<Chunk> cut_into_chunks(const std::vector<std::int64_t>& sizes) {
  std::vector<Chunk> chunks;
  for (std::size_t i = 0; i < sizes.size(); ++i)
    for (std::int64_t begin = 0; begin < sizes[i]; begin += kMaxRun)
      chunks.push_back({i, begin, std::min(kMaxRun, sizes[i] - begin)});
  return chunks;
}

std::size_t first_chunk_of(int rank, int ranks, const std::vector<Chunk>& chunks) {
  std::int64_t all = 0;
  for (const Chunk& chunk : chunks) all += chunk.count;
  std::int64_t before = 0;
  std::size_t i = 0;
  for (; i < chunks.size() && before * ranks < all * rank; ++i) before += chunks[i].count;
  return i;
}

}  // namespace lockstep
