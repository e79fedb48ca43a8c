// SPDX-License-Identifier: Apache-2.0
#include "lockstep/collective/shm/reduce_kernels.h"

#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

namespace lockstep::shm {
namespace {

std::vector<std::byte> random_bytes(size_t bytes, unsigned seed) {
  std::mt19937 random(seed);
  std::vector<std::byte> data(bytes);
  for (std::byte& one : data) one = static_cast<std::byte>(random());
  return data;
}

std::vector<std::byte> reduced_with(Kernels kernels, const std::vector<std::vector<std::byte>>& inputs, size_t count,
                                    DType dtype, ReduceOp op) {
  std::vector<const std::byte*> sources;
  for (const auto& input : inputs) sources.push_back(input.data() + 1);  // not aligned
  std::vector<std::byte> first(count * size_of(dtype));
  std::vector<std::byte> second(first.size());
  const std::array<std::byte*, 2> destinations{first.data(), second.data()};
  reduce({.sources = sources, .destinations = destinations, .count = count, .divisor = 3, .streamed = 1}, dtype, op,
         kernels);
  EXPECT_EQ(first, second);
  return first;
}

TEST(reduce_kernels, give_the_same_bits_with_every_vector_width) {
  const Kernels widest = supported(Kernels::kAvx512) ? Kernels::kAvx512 : Kernels::kBaseline;
  for (int dtype = 0; dtype < kDTypes; ++dtype)
    for (int op = 0; op < kReduceOps; ++op) {
      const auto [type, operation] = std::pair{static_cast<DType>(dtype), static_cast<ReduceOp>(op)};
      if (!defined(type, operation)) continue;
      for (const size_t count : {1, 7, 64, 333, 1024}) {
        std::vector<std::vector<std::byte>> inputs;
        for (unsigned rank = 0; rank < 3; ++rank) inputs.push_back(random_bytes(count * 8 + 1, rank));
        const auto baseline = reduced_with(Kernels::kBaseline, inputs, count, type, operation);
        const auto wide = reduced_with(widest, inputs, count, type, operation);
        EXPECT_EQ(baseline, wide) << to_string(operation) << " of " << count << " " << to_string(type);
      }
    }
}

template <class T>
T reduce_two(DType dtype, ReduceOp op, T a, T b) {
  T result{};
  const std::array sources{reinterpret_cast<const std::byte*>(&a), reinterpret_cast<const std::byte*>(&b)};
  const std::array destinations{reinterpret_cast<std::byte*>(&result)};
  reduce({.sources = sources, .destinations = destinations, .count = 1, .divisor = 2}, dtype, op);
  return result;
}

TEST(reduce_kernels, let_nan_win_in_min_and_max) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  for (const ReduceOp op : {ReduceOp::kMin, ReduceOp::kMax}) {
    EXPECT_TRUE(std::isnan(reduce_two(DType::kFloat32, op, nan, 1.F)));
    EXPECT_TRUE(std::isnan(reduce_two(DType::kFloat32, op, 1.F, nan)));
  }
}

TEST(reduce_kernels, wrap_integers_and_divide_the_wrapped_sum) {
  EXPECT_EQ(reduce_two<int8_t>(DType::kInt8, ReduceOp::kSum, 100, 100), -56);
  EXPECT_EQ(reduce_two<int8_t>(DType::kInt8, ReduceOp::kMean, 100, 100), -28);
  EXPECT_EQ(reduce_two<int32_t>(DType::kInt32, ReduceOp::kMean, -3, -4), -3);
  EXPECT_EQ(reduce_two<uint8_t>(DType::kUInt8, ReduceOp::kMax, 200, 100), 200);
}

TEST(reduce_kernels, round_bfloat16_and_float16_to_nearest_even) {
  // 1 + 2^-8 lies half way between two bfloat16; 1 + 2^-7 + 2^-8 too, and goes up.
  EXPECT_EQ(reduce_two<uint16_t>(DType::kBFloat16, ReduceOp::kSum, 0x3f80, 0x3b80), 0x3f80);
  EXPECT_EQ(reduce_two<uint16_t>(DType::kBFloat16, ReduceOp::kSum, 0x3f81, 0x3b80), 0x3f82);
  // The same for float16 with 2^-11.
  EXPECT_EQ(reduce_two<uint16_t>(DType::kFloat16, ReduceOp::kSum, 0x3c00, 0x1000), 0x3c00);
  EXPECT_EQ(reduce_two<uint16_t>(DType::kFloat16, ReduceOp::kSum, 0x3c01, 0x1000), 0x3c02);
  EXPECT_EQ(reduce_two<uint16_t>(DType::kFloat16, ReduceOp::kSum, 0x7bff, 0x7bff), 0x7c00);            // infinity
  EXPECT_EQ(reduce_two<uint16_t>(DType::kFloat16, ReduceOp::kSum, 0x0001, 0x0002), 0x0003);            // subnormal
  EXPECT_EQ(reduce_two<uint16_t>(DType::kBFloat16, ReduceOp::kSum, 0x7fc1, 0x3f80) & 0x7fc0, 0x7fc0);  // NaN
}

TEST(reduce_kernels, know_what_is_not_defined) {
  EXPECT_FALSE(defined(DType::kFloat32, ReduceOp::kBitOr));
  EXPECT_FALSE(defined(DType::kBool, ReduceOp::kMean));
  EXPECT_TRUE(defined(DType::kBool, ReduceOp::kBitXor));
}

}  // namespace
}  // namespace lockstep::shm
