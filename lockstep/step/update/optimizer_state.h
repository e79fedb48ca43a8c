// SPDX-License-Identifier: Apache-2.0
// step/update/optimizer_state.h: the parameters of an optimizer, the arrays beside each of them, and the chunks into which an update
// cuts them.
//
// Owns:    the arrays, together with everybody who shares their memory
// Threads: one at a time
// Ranks:   every rank cuts the same chunks
#pragma once

#include <torch/types.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <span>
#include <vector>

#include "lockstep/collective/shared_memory.h"
#include "lockstep/optimizer.h"

namespace lockstep {

inline bool is_16_bit(const torch::Tensor& parameter) { return parameter.element_size() == 2; }

// Arrays have the parameter's shape and memory order, and are float32 for 16-bit parameters. Where each rank updates a slice, they
// lie beside each part of it (step/gradient_slices.h).
struct OptimizerState {
  Tensors parameters;            // each once, also if it has two names
  std::vector<size_t> group_of;  // the parameter group of each
  std::vector<int64_t> steps;    // updates so far
  std::vector<Tensors> arrays;   // [name][parameter or part], in the order of UpdateRule::state_names()
  Tensors averages;              // with ema_decay
  Tensors masters;               // the float32 originals of 16-bit parameters; else undefined
  double ema_decay = 0;          // 0: no moving average

  // Calls call(list) for every list of arrays beside the parameters.
  void for_each_list(const auto& call) const {
    for (const auto& array : arrays) call(array);
    call(averages);
    call(masters);
  }

  // Makes every list that this optimizer needs: beside(wanted) returns one, with an array where wanted(parameter).
  void make_lists(const auto& beside) {
    const auto every = [](const torch::Tensor&) { return true; };
    for (auto& array : arrays) array = beside(every);
    if (ema_decay > 0) averages = beside(every);
    if (std::ranges::any_of(parameters, is_16_bit)) masters = beside(is_16_bit);
  }
};

// The dtype of a parameter's update and of the arrays beside it: float64 for float64, float32 for all others.
inline torch::ScalarType state_dtype(const torch::Tensor& parameter) {
  return parameter.scalar_type() == torch::kFloat64 ? torch::kFloat64 : torch::kFloat32;
}

using Wanted = bool (*)(const torch::Tensor& parameter);

// A zeroed array beside each parameter that is wanted. All lie in one allocation, which the ranks share. Collective, blocks.
Tensors arrays_beside(const Tensors& parameters, SharedMemory& memory, Wanted wanted);

// Clips as torch::nn::utils::clip_grad_norm_ does: the factor of gradients of this norm.
inline double clip_factor(const ClippingOptions& clipping, double norm) {
  return clipping.max_norm > 0 ? std::min(1.0, clipping.max_norm / (norm + 1e-6)) : 1;
}

// ---- Chunks

// Elements [begin, begin + count) of a parameter.
struct Chunk {
  size_t parameter;
  int64_t begin;
  int64_t count;
};

// Cuts parameters into chunks of at most kMaxChunk elements (step/update/mean.h).
std::vector<Chunk> cut_into_chunks(const Tensors& parameters);

// The first chunk that `rank` owns; it owns all from there to first_chunk_of(rank + 1). Every rank has 1/ranks of the
// elements, up to a chunk.
size_t first_chunk_of(int rank, int ranks, const std::vector<Chunk>& chunks);

// Memory of the values of some elements of a parameter: in the rule's arrays, then the following; empty where there are none.
// An update writes those in [first, last), and may read the others.
struct Targets {
  std::array<std::span<std::byte>, kMaxStates + 3> all{};
  size_t first = 0, last = kMaxStates + 3;
};
inline constexpr size_t kAverage = kMaxStates;
inline constexpr size_t kValues = kMaxStates + 1;  // that the rule updates: the parameter, or its master
inline constexpr size_t kStored = kMaxStates + 2;  // a 16-bit parameter

}  // namespace lockstep
