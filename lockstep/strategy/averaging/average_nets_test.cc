// SPDX-License-Identifier: Apache-2.0
#include "lockstep/average_nets.h"

#include <torch/nn/modules/conv.h>

#include "tests/strategies.h"
#include "tests/support.h"

namespace lockstep {
namespace {

using namespace testing;

// Nets whose parameters are all 1, 2, 3 ..., a net on each device.
std::vector<ModulePtr> numbered_nets(const Devices& devices) {
  const torch::NoGradGuard no_grad;
  std::vector<ModulePtr> nets;
  for (int i = 0; i < devices.size(); ++i) {
    nets.push_back(small_task().make_model());
    nets.back()->to(devices.where(i));
    for (torch::Tensor& parameter : nets.back()->parameters()) parameter.fill_(i + 1);
  }
  return nets;
}

void expect_all(const std::vector<ModulePtr>& nets, double value) {
  for (const ModulePtr& net : nets)
    for (const torch::Tensor& parameter : net->parameters()) EXPECT_TRUE(parameter.eq(value).all().item<bool>());
}

TEST(AverageNets, gives_every_net_the_mean) {
  for (const int count : {1, 2, 3, 4, 7}) {
    Devices devices({.count = count, .places = test_places(count)});
    const auto nets = numbered_nets(devices);
    average(devices, flat_blocks(nets), std::vector<int64_t>(static_cast<size_t>(count), 4));
    for (const ModulePtr& net : nets)
      EXPECT_NEAR(net->parameters()[0][0][0].item<double>(), (count + 1) / 2.0, 1e-12) << count;
  }
}

TEST(AverageNets, weighs_them_by_samples) {
  Devices devices({.count = 4, .places = test_places(4)});
  const auto nets = numbered_nets(devices);
  const auto blocks = flat_blocks(nets);
  average(devices, blocks, {4, 0, 2, 2});
  expect_all(nets, 1 * 0.5 + 3 * 0.25 + 4 * 0.25);
  average(devices, blocks);
  expect_all(nets, 2.25);
}

TEST(AverageNets, takes_strides_that_place_values_alike) {
  const torch::nn::Conv2d one(3, 2, 1), other(3, 2, 1);
  for (size_t i = 0; i < one->parameters().size(); ++i)
    other->parameters()[i].set_data(one->parameters()[i].detach().clone());
  other->weight.set_data(one->weight.detach().clone(torch::MemoryFormat::ChannelsLast));
  ASSERT_NE(one->weight.strides(), other->weight.strides());
  const Tensors blocks = flat_blocks({one.ptr(), other.ptr()});
  EXPECT_TRUE(torch::equal(blocks[0], blocks[1]));
}

TEST(AverageNets, refuses_nets_that_have_no_blocks_of_one_layout) {
  const auto net_of = [](int inputs) { return torch::nn::Linear(inputs, 2).ptr(); };
  const auto refusal = [](const std::vector<ModulePtr>& nets) {
    return message_of<UsageError>([&] { flat_blocks(nets); });
  };
  EXPECT_TRUE(contains(refusal({net_of(3), net_of(4)}), "shapes or strides differ"));
  const auto with_gaps = net_of(3);
  with_gaps->parameters()[0].set_data(torch::ones({2, 6}).slice(1, 0, 6, 2));
  EXPECT_TRUE(contains(refusal({with_gaps}), "gaps or overlaps in memory"));
}

TEST(AverageNets, refuses_invalid_weights) {
  Devices devices({.count = 2, .places = test_places(2)});
  const auto blocks = flat_blocks(numbered_nets(devices));
  EXPECT_THROW(average(devices, blocks, {0, 0}), UsageError);
  EXPECT_THROW(average(devices, blocks, {2, -1}), UsageError);
  EXPECT_THROW(average(devices, blocks, {1}), UsageError);
  EXPECT_THROW(average(devices, {blocks[0]}), UsageError);
}

}  // namespace
}  // namespace lockstep
