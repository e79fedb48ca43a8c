// SPDX-License-Identifier: Apache-2.0
// step/two_bit.h: gradients in two bits per element: -threshold, 0 or +threshold; the rest stays in a residual.
// See two_bit_hook() (lockstep/communication_hook.h).
//
// Threads: pure functions
// Ranks:   no communication
#pragma once

#include <torch/types.h>

#include <cstdint>

namespace lockstep {

// Codes of the elements of `residual`, (n) of floating point, from which the coded values are then subtracted. A code is
// 1 for +threshold, 2 for -threshold, 0 for 0; sixteen of them fill 32 bits, the first one the lowest. Returns int32
// (two_bit_words(n)).
torch::Tensor take_two_bits(torch::Tensor residual, double threshold);

// The coded values: (count) of the options' dtype. words: as take_two_bits() returns them.
torch::Tensor from_two_bits(const torch::Tensor& words, int64_t count, double threshold,
                            const torch::TensorOptions& options);

constexpr int64_t two_bit_words(int64_t count) { return (count + 15) / 16; }

}  // namespace lockstep
