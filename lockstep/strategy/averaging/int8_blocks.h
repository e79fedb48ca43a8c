// SPDX-License-Identifier: Apache-2.0
// strategy/averaging/int8_blocks.h: numbers as 8-bit integers. Each block of 4,096 has a float32 scale: its largest
// absolute value / 127.
//
// Threads: pure functions
// Ranks:   no communication
#pragma once

#include "lockstep/named_tensor.h"

namespace lockstep {

// Codes the elements of `left`, (n) of floating point on the CPU, and subtracts the coded values from it: what remains was
// lost. Returns uint8 (int8_bytes(n)): the scales, then the integers.
Tensor take_int8(const Tensor& left);

// The coded values: (count) of the options' dtype. bytes: as take_int8() returns them.
Tensor from_int8(const Tensor& bytes, int64_t count, const torch::TensorOptions& options);

inline constexpr int64_t kInt8Block = 4096;
constexpr int64_t int8_blocks(int64_t count) { return (count + kInt8Block - 1) / kInt8Block; }
constexpr int64_t int8_bytes(int64_t count) { return int8_blocks(count) * 4 + count; }

}  // namespace lockstep
