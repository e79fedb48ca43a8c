// SPDX-License-Identifier: Apache-2.0
// optimizer/chunks.h: how parameters are cut into chunks, which rank owns which, and arrays of an optimizer beside parameters.
//
// Flow:    parameters -> here -> flat_update.h
// Threads: any; nothing is kept here
// Ranks:   every rank finds the same
#pragma once

#include <torch/types.h>

#include <cstdint>
#include <vector>

#include "lockstep/collective/shared_memory.h"

namespace lockstep {

// Elements [begin, begin + count) of a parameter.
struct Chunk {
  std::size_t parameter;
  std::int64_t begin;
  std::int64_t count;
};

// Of at most kMaxRun elements.
std::vector<Chunk> cut_into_chunks(const std::vector<torch::Tensor>& parameters);

// The first chunk that `rank` owns; it owns all from there to first_chunk_of(rank + 1). Every rank has 1/ranks of the
// elements, up to a chunk.
std::size_t first_chunk_of(int rank, int ranks, const std::vector<Chunk>& chunks);

// The dtype of a parameter's update and state: float64 for float64, float32 for all others.
torch::ScalarType computed_in(const torch::Tensor& parameter);

// Bytes of a chunk's gradient, at most.
std::size_t gradient_bytes_of_chunk(const std::vector<torch::Tensor>& parameters);

// A zeroed array beside each parameter that is `wanted`. All lie in one allocation, which the ranks share. Collective, blocks.
std::vector<torch::Tensor> arrays_beside(const std::vector<torch::Tensor>& parameters, SharedMemory& memory,
                                         bool (*wanted)(const torch::Tensor&));

// What belongs to the chunk in arrays that are beside the parameters, or in these.
template <class T>
T* part_of(const std::vector<torch::Tensor>& arrays, const Chunk& chunk) {
  return static_cast<T*>(arrays[chunk.parameter].mutable_data_ptr()) + chunk.begin;
}

}  // namespace lockstep
