// SPDX-License-Identifier: Apache-2.0
#include "lockstep/models.h"

#include <gtest/gtest.h>

#include "lockstep/layout.h"

namespace lockstep {
namespace {

TEST(LeNet, has_the_published_layers) {
  const LeNet net;
  std::vector<std::vector<int64_t>> shapes;
  int64_t parameters = 0;
  for (const auto& parameter : net->parameters()) {
    shapes.push_back(parameter.sizes().vec());
    parameters += parameter.numel();
  }
  const std::vector<std::vector<int64_t>> expected = {{20, 1, 3, 3}, {20},  {50, 20, 5, 5}, {50},
                                                      {128, 800},    {128}, {10, 128},      {10}};
  EXPECT_EQ(shapes, expected);
  EXPECT_EQ(parameters, 129068);
}

TEST(LeNet, gives_ten_logits_per_image_even_for_an_empty_batch) {
  LeNet net;
  EXPECT_EQ(net(torch::rand({3, 1, 28, 28})).sizes(), (std::vector<int64_t>{3, 10}));
  EXPECT_EQ(net(torch::rand({0, 1, 28, 28})).sizes(), (std::vector<int64_t>{0, 10}));
}

TEST(Layout, changes_strides_and_not_values) {
  LeNet net;
  net->to(torch::kFloat64);
  const torch::Tensor images = torch::rand({4, 1, 28, 28}, torch::kFloat64);
  const torch::Tensor before = net(images);
  set_layout(*net, Layout::kChannelsLast);
  EXPECT_TRUE(net->parameters()[2].is_contiguous(torch::MemoryFormat::ChannelsLast));
  EXPECT_TRUE(torch::allclose(net(in_layout(images, Layout::kChannelsLast)), before, 1e-12, 1e-12));
}

// The strides of both an image and a weight with one channel fit either order.
TEST(Layout, channels_last_reaches_a_convolution_of_one_channel) {
  torch::nn::Conv2d conv(1, 20, 3);
  set_layout(*conv, Layout::kChannelsLast);
  const torch::Tensor images = in_layout(torch::rand({4, 1, 28, 28}), Layout::kChannelsLast);
  EXPECT_TRUE(conv(images).is_contiguous(torch::MemoryFormat::ChannelsLast));
}

TEST(Layout, prefers_channels_last_for_convolutions_on_a_cpu) {
  EXPECT_EQ(preferred_layout(*LeNet(), torch::kCPU), Layout::kChannelsLast);
  EXPECT_EQ(preferred_layout(*LeNet(), torch::kCUDA), Layout::kContiguous);
  EXPECT_EQ(preferred_layout(*torch::nn::Linear(2, 2), torch::kCPU), Layout::kContiguous);
}

}  // namespace
}  // namespace lockstep
