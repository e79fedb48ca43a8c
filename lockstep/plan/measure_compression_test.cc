// SPDX-License-Identifier: Apache-2.0
#include "lockstep/plan/measure_compression.h"

#include <gtest/gtest.h>

#include <torch/nn/modules/linear.h>

namespace lockstep::plan {
namespace {

TEST(MeasureCompression, KnowsWhatEachKindSendsAndTakes) {
  torch::nn::Linear linear(64, 64);
  Profile profile;
  profile.compression = measure_compression(*linear);
  ASSERT_EQ(profile.compression.size(), 5U);
  const auto sent = [&](const char* kind) { return compression_for(profile, kind).sent; };
  EXPECT_DOUBLE_EQ(sent("fp16"), 0.5);
  EXPECT_DOUBLE_EQ(sent("bf16"), 0.5);
  EXPECT_DOUBLE_EQ(sent("2bit"), 1.0 / 16);
  EXPECT_DOUBLE_EQ(sent("topk"), 0.02);
  // 4 x (64 + 64) elements for the weight's 64 x 64, and the bias as it is.
  EXPECT_DOUBLE_EQ(sent("powersgd"), (4.0 * 128 + 64) / (64 * 64 + 64));
  for (const CompressionTimes& each : profile.compression) {
    EXPECT_GT(each.encode, 0) << each.kind;
    EXPECT_GT(each.decode, 0) << each.kind;
  }
}

}  // namespace
}  // namespace lockstep::plan
