// SPDX-License-Identifier: Apache-2.0
#include "lockstep/strategy/averaging/int8_blocks.h"

#include <limits>

namespace lockstep {

// A NaN makes the scale of its block NaN, and so all of its values.
Tensor take_int8(const Tensor& left) {
  constexpr int kLargest = std::numeric_limits<int8_t>::max();
  const int64_t count = left.numel(), blocks = int8_blocks(count);
  const Tensor rows = torch::constant_pad_nd(left, {0, blocks * kInt8Block - count}).view({blocks, kInt8Block});
  const Tensor scales =
      (rows.abs().amax(1) / kLargest).to(torch::kFloat32).clamp_min(std::numeric_limits<float>::min());
  const Tensor codes = (rows / scales.to(rows.scalar_type()).unsqueeze(1)).round_().to(torch::kInt8);
  const Tensor bytes = torch::cat({scales.view(torch::kUInt8), codes.flatten().slice(0, 0, count).view(torch::kUInt8)});
  left.sub_(from_int8(bytes, count, left.options()));
  return bytes;
}

Tensor from_int8(const Tensor& bytes, int64_t count, const torch::TensorOptions& options) {
  const int64_t of_scales = int8_blocks(count) * 4;
  const Tensor scales = bytes.slice(0, 0, of_scales).clone().view(torch::kFloat32);  // aligned
  const Tensor values = bytes.slice(0, of_scales).view(torch::kInt8).to(options);
  return values.mul_(scales.to(options).repeat_interleave(kInt8Block).slice(0, 0, count));
}

}  // namespace lockstep
