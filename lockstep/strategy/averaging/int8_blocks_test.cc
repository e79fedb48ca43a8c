// SPDX-License-Identifier: Apache-2.0
#include "lockstep/strategy/averaging/int8_blocks.h"

#include <ATen/CPUGeneratorImpl.h>
#include <gtest/gtest.h>

#include <limits>

namespace lockstep {
namespace {

torch::Tensor noise(int64_t count, uint64_t seed) {
  return torch::randn({count}, at::make_generator<at::CPUGeneratorImpl>(seed), torch::TensorOptions(torch::kFloat64));
}

TEST(Int8Blocks, send_in_the_end_what_was_given) {
  for (const int64_t count : {1, 4095, 4096, 10001}) {
    const auto options = torch::TensorOptions(torch::kFloat64);
    const torch::Tensor left = torch::zeros({count}, options), given = left.clone(), sent = left.clone();
    for (uint64_t round = 0; round < 10; ++round) {
      const torch::Tensor input = noise(count, round);
      given.add_(input);
      const torch::Tensor bytes = take_int8(left.add_(input));
      EXPECT_EQ(bytes.numel(), int8_bytes(count));
      sent.add_(from_int8(bytes, count, options));
    }
    EXPECT_TRUE(torch::allclose(sent + left, given, 0, 1e-12)) << count;
    EXPECT_GT(left.abs().max().item<double>(), 0) << count;
  }
}

TEST(Int8Blocks, round_to_the_127th_part_of_the_largest_of_a_block) {
  const torch::Tensor input = noise(10000, 1).to(torch::kFloat32);
  input.slice(0, 4096, 8192).mul_(1e-6);
  const torch::Tensor left = input.clone();
  const torch::Tensor sent = from_int8(take_int8(left), input.numel(), input.options());
  for (int64_t begin = 0; begin < input.numel(); begin += kInt8Block) {
    const auto block = [&](const torch::Tensor& all) { return all.slice(0, begin, begin + kInt8Block); };
    const double step = block(input).abs().max().item<double>() / 127;
    EXPECT_LE((block(sent) - block(input)).abs().max().item<double>(), step * 0.50001) << begin;
    EXPECT_TRUE(torch::allclose(block(sent) + block(left), block(input), 0, step * 1e-4)) << begin;
  }
}

TEST(Int8Blocks, keep_zeros_and_show_what_is_not_finite) {
  const torch::Tensor input = torch::zeros({8192});
  input[5000] = std::numeric_limits<float>::quiet_NaN();
  const torch::Tensor sent = from_int8(take_int8(input.clone()), 8192, input.options());
  EXPECT_TRUE(sent.slice(0, 0, 4096).eq(0).all().item<bool>());
  EXPECT_TRUE(sent.slice(0, 4096).isnan().all().item<bool>());
}

}  // namespace
}  // namespace lockstep
