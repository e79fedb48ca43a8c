// optimizer/mean.h: the weighted sum of the same range of several gradients, in an order that depends only on how many
// there are: whoever computes it, the bits are the same.
//
// Threads: pure functions
// Ranks:   no communication
#pragma once

#include <torch/types.h>

#include <cstdint>
#include <span>

namespace lockstep {

// One summand: weight * data[begin ... begin + count); data nullptr counts as zero.
struct Term {
  const void* data;
  double weight;
};

// sum[i] = sum over terms of weight * data[begin + i], for i < count <= kMaxRun, in neighbouring pairs:
// ((0+1)+(2+3))+... dtype: of the data: float32, float64, float16 or bfloat16. sum: float, for float64 data double.
// Throws UsageError: another dtype.
inline constexpr std::int64_t kMaxRun = 4096;
template <class T>
void weighted_sum(std::span<const Term> terms, torch::ScalarType dtype, std::int64_t begin, std::int64_t count, T* sum);

}  // namespace lockstep
