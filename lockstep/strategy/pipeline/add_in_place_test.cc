// SPDX-License-Identifier: Apache-2.0
#include "lockstep/strategy/pipeline/add_in_place.h"

#include <gtest/gtest.h>
#include <torch/nn/modules/conv.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>

#include <optional>

#include "lockstep/model/allocation_meter.h"

namespace lockstep {
namespace {

struct Tied {
  torch::nn::Embedding embedding{50, 8};
  torch::nn::Linear inner{8, 8};
  torch::Tensor forward(const torch::Tensor& tokens) {
    return torch::linear(inner->forward(embedding->forward(tokens)).tanh(), embedding->weight);
  }
};

// Two backwards add up.
std::vector<torch::Tensor> gradients_of(Tied& model, bool in_place, torch::ScalarType dtype) {
  LargeWeights large(1);
  for (int step = 0; step < 2; ++step) {
    const torch::Tensor tokens = (torch::arange(12).reshape({3, 4}) * 7 + step).remainder(50);
    torch::Tensor output;
    {
      std::optional<OperatorHandlerGuard> guard;
      if (in_place) guard.emplace(large);
      output = model.forward(tokens);
    }
    (output * torch::linspace(0, 1, 50, dtype)).square().mean().backward();
  }
  std::vector<torch::Tensor> gradients;
  for (torch::Tensor parameter : {model.embedding->weight, model.inner->weight, model.inner->bias}) {
    gradients.push_back(parameter.grad());
    parameter.mutable_grad() = torch::Tensor();
  }
  return gradients;
}

TEST(LargeWeights, have_the_gradients_of_plain_autograd) {
  Tied model;
  model.embedding->to(torch::kFloat64);
  model.inner->to(torch::kFloat64);
  const auto expected = gradients_of(model, false, torch::kFloat64), found = gradients_of(model, true, torch::kFloat64);
  for (size_t i = 0; i < expected.size(); ++i) EXPECT_TRUE(torch::allclose(found[i], expected[i], 1e-12, 1e-14)) << i;
}

// Makes the gradient of 40 output channels, 16, 16 and 8 at a time.
std::vector<torch::Tensor> gradients_of(torch::nn::Conv2d& convolution, bool in_place, const torch::Tensor& images) {
  LargeWeights large(1);
  torch::Tensor input = images.detach().clone().requires_grad_();
  for (int step = 0; step < 2; ++step) {
    torch::Tensor output;
    {
      std::optional<OperatorHandlerGuard> guard;
      if (in_place) guard.emplace(large);
      output = convolution->forward(input);
    }
    output.square().mean().backward();
  }
  std::vector<torch::Tensor> gradients = {input.grad()};
  for (torch::Tensor parameter : convolution->parameters()) {
    gradients.push_back(parameter.grad());
    parameter.mutable_grad() = torch::Tensor();
  }
  return gradients;
}

TEST(LargeWeights, have_the_gradients_of_plain_autograd_in_a_convolution) {
  for (const auto format : {torch::MemoryFormat::Contiguous, torch::MemoryFormat::ChannelsLast}) {
    torch::nn::Conv2d convolution(torch::nn::Conv2dOptions(6, 40, 3).stride(2).padding(1).dilation(2));
    convolution->to(torch::kFloat64);
    convolution->weight.set_data(convolution->weight.contiguous(format));
    const torch::Tensor images = torch::rand({3, 6, 9, 8}, torch::kFloat64).contiguous(format);
    const auto expected = gradients_of(convolution, false, images), found = gradients_of(convolution, true, images);
    ASSERT_EQ(found.size(), 3U);
    for (size_t i = 0; i < expected.size(); ++i) EXPECT_TRUE(torch::allclose(found[i], expected[i], 1e-12, 1e-14)) << i;
  }
}

TEST(LargeWeights, need_little_more_than_one_gradient_of_a_convolution) {
  torch::nn::Conv2d convolution(torch::nn::Conv2dOptions(512, 512, 3).bias(false));
  const torch::Tensor images = torch::ones({16, 512, 3, 3});
  LargeWeights large;
  const AllocationMeter meter;
  for (int step = 0; step < 2; ++step) {
    const OperatorHandlerGuard guard(large);
    convolution->forward(images).sum().backward();
  }
  EXPECT_LT(meter.most(), convolution->weight.numel() * 4 * 5 / 2);  // forward copies the weight into another layout
}

TEST(LargeWeights, leave_weights_with_hooks_to_autograd) {
  torch::nn::Linear layer(8, 8);
  int calls = 0;
  layer->weight.register_hook([&](const torch::Tensor&) { ++calls; });
  LargeWeights large(1);
  for (int step = 0; step < 2; ++step) {
    const OperatorHandlerGuard guard(large);
    torch::linear(torch::ones({2, 8}), layer->weight).sum().backward();
  }
  EXPECT_EQ(calls, 2);
}

TEST(LargeWeights, need_one_gradient_and_no_second) {
  torch::nn::Linear layer(torch::nn::LinearOptions(1024, 1024).bias(false));
  LargeWeights large;
  const AllocationMeter meter;
  for (int step = 0; step < 3; ++step) {
    const OperatorHandlerGuard guard(large);
    torch::linear(torch::ones({1, 1024}), layer->weight).sum().backward();
  }
  EXPECT_LT(meter.most(), 1024 * 1024 * 4 * 3 / 2);
}

}  // namespace
}  // namespace lockstep
