// SPDX-License-Identifier: Apache-2.0
// step/update/mean.h: the weighted sum of the same range of several gradients, in an order that depends only on how many
// there are: every rank that computes it gets the same bits.
//
// Threads: pure functions
// Ranks:   no communication
#pragma once

#include <torch/types.h>

#include <cstdint>
#include <span>

namespace lockstep {

inline constexpr int64_t kMaxChunk = 4096;  // elements: two buffers of float32 fill a 32 KiB first-level cache

// One summand: weight * data[begin ... begin + count); data nullptr counts as zero.
struct Term {
  const void* data;
  double weight;
};

// sum[i] = sum over terms of weight * data[begin + i], for i < count <= kMaxChunk, as a binary tree of neighbours:
// ((0+1)+(2+3))+((4+5)+(6+7)). dtype: of the data: float32, float64, float16 or bfloat16. sum: float; double for float64
// data. Throws UsageError: another dtype.
template <class T>
void weighted_sum(std::span<const Term> terms, torch::ScalarType dtype, int64_t begin, int64_t count, T* sum);

// Replaces the range of each term's data by the sum.
void replace_by_sum(std::span<const Term> terms, torch::ScalarType dtype, int64_t begin, int64_t count);

}  // namespace lockstep
