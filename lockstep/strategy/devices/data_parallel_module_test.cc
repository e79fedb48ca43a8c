// SPDX-License-Identifier: Apache-2.0
#include "lockstep/data_parallel.h"

#include <torch/optim/sgd.h>

#include "tests/strategies.h"
#include "tests/support.h"

namespace lockstep {
namespace {

using namespace testing;

class DataParallelOn : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Sizes, DataParallelOn, ::testing::Values(1, 2, 3, 4));

torch::nn::Sequential small_net() {
  torch::nn::Sequential net(torch::nn::Linear(6, 8), torch::nn::Tanh(), torch::nn::Linear(8, 4));
  net->to(torch::kFloat64);
  return net;
}

// A loss over the whole batch that is no mean over samples.
torch::Tensor spread_of(const torch::Tensor& outputs) { return outputs.var(0).sum() + outputs.sum().square(); }

// The parameters after some steps of a torch optimizer, each with two backward passes that add up.
template <class Forward, class Backward>
std::vector<torch::Tensor> trained(torch::nn::Module& module, const Forward& forward, const Backward& backward) {
  torch::optim::SGD optimizer(module.parameters(), torch::optim::SGDOptions(0.01).momentum(0.9));
  for (int step = 0; step < kSteps; ++step) {
    for (int pass = 0; pass < 2; ++pass) backward(spread_of(forward(batch_of(2 * step + pass, 10 + pass).data)));
    optimizer.step();
    optimizer.zero_grad();
  }
  return values_of(module);
}

TEST_P(DataParallelOn, trains_a_users_module_as_one_device_does) {
  Devices devices({.count = GetParam(), .places = test_places(GetParam())});
  DataParallel net(small_net, devices, 5);
  torch::manual_seed(5);
  auto one = small_net();
  const auto expected = trained(
      *one, [&](const torch::Tensor& data) { return one->forward(data); },
      [](const torch::Tensor& loss) { loss.backward(); });
  const auto found = trained(
      net.module(), [&](const torch::Tensor& data) { return net.forward(data); },
      [&](const torch::Tensor& loss) { net.backward(loss); });
  expect_same_course({.parameters = found, .losses = {}}, {.parameters = expected, .losses = {}});
}

TEST_P(DataParallelOn, wraps_a_module_that_exists) {
  Devices devices({.count = GetParam(), .places = test_places(GetParam())});
  auto existing = small_net();
  const auto one = std::dynamic_pointer_cast<torch::nn::SequentialImpl>(existing->clone());
  DataParallel net(existing, devices);
  EXPECT_EQ(&net.module(), existing.get());
  const auto data = batch_of(0).data;
  EXPECT_TRUE(torch::allclose(net.forward(data).cpu(), one->forward(data), 1e-12, 1e-12));
  net.backward(spread_of(net.forward(data)));
  spread_of(one->forward(data)).backward();
  for (size_t i = 0; i < one->parameters().size(); ++i)
    EXPECT_TRUE(torch::allclose(existing->parameters()[i].grad().cpu(), one->parameters()[i].grad(), 1e-9, 1e-9));
}

TEST_P(DataParallelOn, trains_what_the_module_trains) {
  Devices devices({.count = GetParam(), .places = test_places(GetParam())});
  torch::nn::Sequential net(torch::nn::Linear(6, 4), torch::nn::BatchNorm1d(4));
  net->to(torch::kFloat64);
  net->parameters()[0].set_requires_grad(false);
  DataParallel wrapped(net, devices);
  net->children()[1]->eval();
  net->parameters()[1].set_requires_grad(false);
  wrapped.backward(wrapped.forward(batch_of(0).data).sum());
  for (size_t i = 0; i < 4; ++i) EXPECT_EQ(net->parameters()[i].grad().defined(), i >= 2) << i;
  for (const torch::Tensor& buffer : net->buffers())  // of BatchNorm1d in evaluation mode
    EXPECT_TRUE(buffer.eq(0).all().item<bool>() || buffer.eq(1).all().item<bool>());
}

TEST_P(DataParallelOn, adds_the_gradients_of_several_forwards_of_one_loss) {
  Devices devices({.count = GetParam(), .places = test_places(GetParam())});
  DataParallel net(small_net, devices, 5);
  const auto a = batch_of(0).data, b = batch_of(1, 3).data;  // with four devices one has no sample of b
  net.backward(spread_of(net.forward(a)) * spread_of(net.forward(b)));
  torch::manual_seed(5);
  auto one = small_net();
  (spread_of(one->forward(a)) * spread_of(one->forward(b))).backward();
  for (size_t i = 0; i < one->parameters().size(); ++i)
    EXPECT_TRUE(torch::allclose(net.module().parameters()[i].grad().cpu(), one->parameters()[i].grad(), 1e-9));
}

TEST(DataParallel, computes_no_graph_without_gradients) {
  Devices devices({.count = 2});
  DataParallel net(small_net, devices);
  const torch::NoGradGuard no_grad;
  EXPECT_FALSE(net.forward(batch_of(0).data).requires_grad());
}

TEST(DataParallel, refuses_a_backward_that_would_end_at_its_outputs) {
  Devices devices({.count = 2});
  DataParallel net(small_net, devices);
  const auto loss = spread_of(net.forward(batch_of(0).data));
  EXPECT_TRUE(contains(message_of<UsageError>([&] { loss.backward(); }), "call DataParallel::backward(loss)"));
  EXPECT_THROW(net.forward(torch::zeros({0, 6}, torch::kFloat64)), UsageError);
}

}  // namespace
}  // namespace lockstep
