// SPDX-License-Identifier: Apache-2.0
#include "lockstep/step/update/optimizer_state.h"

#include <memory>

#include "lockstep/base/cache_line.h"
#include "lockstep/step/update/mean.h"

namespace lockstep {

std::vector<Chunk> cut_into_chunks(const Tensors& parameters) {
  std::vector<Chunk> chunks;
  for (size_t i = 0; i < parameters.size(); ++i)
    for (int64_t begin = 0; begin < parameters[i].numel(); begin += kMaxChunk)
      chunks.push_back({i, begin, std::min(kMaxChunk, parameters[i].numel() - begin)});
  return chunks;
}

size_t first_chunk_of(int rank, int ranks, const std::vector<Chunk>& chunks) {
  int64_t all = 0, before = 0;
  for (const Chunk& chunk : chunks) all += chunk.count;
  size_t i = 0;
  for (; i < chunks.size() && before * ranks < all * rank; ++i) before += chunks[i].count;
  return i;
}

Tensors arrays_beside(const Tensors& parameters, SharedMemory& memory, Wanted wanted) {
  size_t bytes = 0;
  std::vector<size_t> offsets;
  for (const torch::Tensor& parameter : parameters) {
    offsets.push_back(bytes);
    if (wanted(parameter)) bytes += round_up(parameter.numel() * c10::elementSize(state_dtype(parameter)), kCacheLine);
  }
  const std::shared_ptr<std::byte> data = memory.allocate_common(bytes);
  Tensors arrays(parameters.size());
  for (size_t i = 0; i < parameters.size(); ++i)
    if (wanted(parameters[i]))
      arrays[i] = torch::from_blob(
          data.get() + offsets[i], parameters[i].sizes(), parameters[i].strides(), [data](void*) {},
          torch::dtype(state_dtype(parameters[i])));
  return arrays;
}

}  // namespace lockstep
