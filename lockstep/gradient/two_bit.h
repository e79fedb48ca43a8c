// gradient/two_bit.h: gradients in two bits per element: -threshold, 0 or +threshold; what that leaves out stays in a
// residual. S2: MXNet's gradient compression. (Seide et al., Interspeech 2014, did it with one bit.)
//
// Threads: pure functions
// Ranks:   no communication
#pragma once

#include <torch/types.h>

#include <cstdint>

namespace lockstep {

// Sixteen elements in 32 bits: 1 for +threshold, 2 for -threshold. residual: (n), of floating point; what the codes say
// is subtracted from it. Returns int32 (two_bit_words(n)).
torch::Tensor take_two_bits(torch::Tensor residual, double threshold);

// What (words) codes say, as (count) of the options' dtype.
torch::Tensor from_two_bits(const torch::Tensor& words, std::int64_t count, double threshold,
                            const torch::TensorOptions& options);

constexpr std::int64_t two_bit_words(std::int64_t count) { return (count + 15) / 16; }

}  // namespace lockstep
