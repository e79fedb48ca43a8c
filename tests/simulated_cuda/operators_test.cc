// SPDX-License-Identifier: Apache-2.0
// Operators on simulated GPUs: the results are those of the CPU.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <thread>

#include "tests/simulated_cuda/four_gpus.h"

namespace lockstep {
namespace {

using torch::Tensor;

TEST(SimulatedOperators, compute_what_the_cpu_computes) {
  const Tensor here = torch::randn({6, 8});
  const Tensor there = here.to(gpu(1));
  EXPECT_EQ(there.device(), gpu(1));
  EXPECT_TRUE(torch::equal((there * 2 + 1).softmax(1).cpu(), (here * 2 + 1).softmax(1)));
  EXPECT_TRUE(torch::equal(there.t().contiguous().view({-1}).cpu(), here.t().contiguous().view({-1})));
  EXPECT_TRUE(torch::equal(there.index({there.gt(0)}).cpu(), here.index({here.gt(0)})));
  EXPECT_EQ(there.sum().item<float>(), here.sum().item<float>());
}

TEST(SimulatedOperators, write_in_place_and_into_out) {
  Tensor there = torch::zeros({3}, gpu(0));
  there.slice(0, 1).add_(2);
  Tensor out = torch::empty({0}, gpu(0));
  torch::add_out(out, there, there);
  EXPECT_TRUE(torch::equal(out.cpu(), torch::tensor({0.f, 4.f, 4.f})));
}

Tensor gradients_of_a_step(torch::Device device) {
  torch::manual_seed(3);
  torch::nn::Sequential net(torch::nn::Conv2d(torch::nn::Conv2dOptions(4, 8, 3).groups(4)), torch::nn::BatchNorm2d(8),
                            torch::nn::ReLU(), torch::nn::MaxPool2d(2), torch::nn::Flatten(),
                            torch::nn::Linear(72, 10));
  net->to(torch::kDouble);
  net->to(device);
  const Tensor images = torch::randn({5, 4, 8, 8}, torch::kDouble).to(device);
  torch::optim::AdamW adam(net->parameters());
  for (int step = 0; step < 2; ++step) {
    adam.zero_grad();
    torch::cross_entropy_loss(net->forward(images), torch::arange(5).to(device)).backward();
    adam.step();
  }
  std::vector<Tensor> all;
  for (const Tensor& parameter : net->parameters()) all.push_back(parameter.detach().flatten().cpu());
  return torch::cat(all);
}

TEST(SimulatedOperators, train_a_convolutional_net_as_the_cpu_does) {
  EXPECT_LT((gradients_of_a_step(gpu(2)) - gradients_of_a_step(torch::kCPU)).abs().max().item<double>(), 1e-9);
}

TEST(SimulatedOperators, run_backward_on_two_devices_in_two_threads) {
  std::vector<Tensor> means(2);
  std::vector<std::thread> threads;
  for (int i = 0; i < 2; ++i)
    threads.emplace_back([&, i] {
      const c10::DeviceGuard guard(gpu(i));
      Tensor weight = torch::ones({4}, torch::requires_grad().device(gpu(i)));
      (weight * (i + 1)).sum().backward();
      means[static_cast<size_t>(i)] = weight.grad();
    });
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ((means[0] + means[1].to(gpu(0))).sum().item<float>(), 12);
}

TEST(SimulatedOperators, of_two_devices_are_refused_with_both_named) {
  const Tensor one = torch::ones({2}, gpu(0));
  const Tensor other = torch::ones({2}, gpu(3));
  try {
    (void)torch::mm(one.view({1, 2}), other.view({2, 1}));
    FAIL() << "no error";
  } catch (const c10::Error& error) {
    EXPECT_NE(std::string(error.what()).find("cuda:0 and cuda:3"), std::string::npos) << error.what();
  }
  EXPECT_THROW((void)torch::mm(one.view({1, 2}), torch::ones({2, 1})), c10::Error);
}

TEST(SimulatedOperators, see_NaN_in_fresh_memory) {
  EXPECT_TRUE(torch::empty({100}, gpu(0)).isnan().all().item<bool>());
}

}  // namespace
}  // namespace lockstep
