// SPDX-License-Identifier: Apache-2.0
// What a test may set on the simulated GPUs, what they count, and what they refuse.
#include <dlfcn.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <csignal>
#include <future>

#include "tests/simulated_cuda/four_gpus.h"
#include "tests/support.h"

namespace lockstep {
namespace {

using lockstep::testing::contains;
using torch::Tensor;
using namespace std::chrono_literals;

class SimulatedSettings : public ::testing::Test {
 protected:
  void SetUp() override { simulated_cuda_reset_counters(); }
  void TearDown() override { simulated_cuda_recover(); }
};

std::string error_of(const std::function<void()>& body) {
  try {
    body();
  } catch (const std::exception& error) {
    return error.what();
  }
  return "no error";
}

TEST_F(SimulatedSettings, count_what_crosses) {
  const Tensor there = torch::ones({1000}).to(gpu(0));
  EXPECT_EQ(counted(0).host_to_device, 4000);
  const Tensor peer = there.to(gpu(1));
  EXPECT_EQ(counted(0).device_to_device, 4000);
  EXPECT_EQ(counted(1).host_to_device, 0);
  EXPECT_EQ(counted(0).device_to_host, 0);
  const auto waits = counted(1).host_waits;
  EXPECT_EQ(peer.cpu().sum().item<float>(), 1000);
  EXPECT_EQ(counted(1).device_to_host, 4000);
  EXPECT_GT(counted(1).host_waits, waits);
  EXPECT_EQ(counted().copies, 3);
}

TEST_F(SimulatedSettings, stage_copies_of_pairs_without_peer_access) {
  simulated_cuda_peer_access(2, 3, 0);
  const Tensor peer = torch::ones({1000}).to(gpu(2)).to(gpu(3));
  simulated_cuda_peer_access(2, 3, 1);
  EXPECT_EQ(peer.sum().item<float>(), 1000);
  EXPECT_EQ(counted(2).staged, 4000);
  EXPECT_EQ(counted(2).device_to_device, 0);
}

TEST_F(SimulatedSettings, limit_the_memory_of_a_device) {
  simulated_cuda_limit(1, std::size_t{1} << 20);
  EXPECT_THROW((void)torch::zeros({1 << 20}, gpu(1)), c10::OutOfMemoryError);
  simulated_cuda_limit(1, std::size_t{1} << 30);
  EXPECT_EQ(torch::zeros({1 << 20}, gpu(1)).sum().item<float>(), 0);
}

TEST_F(SimulatedSettings, fail_an_operator_a_copy_and_an_allocation) {
  const Tensor there = torch::ones({4}, gpu(1));
  EXPECT_EQ(simulated_cuda_fail("operator@1:2"), 0);
  there.add_(1);
  EXPECT_TRUE(contains(error_of([&] { there.add_(1); }), "launch failure on cuda:1"));
  EXPECT_TRUE(contains(error_of([&] { there.add_(1); }), "launch failure on cuda:1"));
  simulated_cuda_recover();
  simulated_cuda_fail("copy@1:1");
  EXPECT_TRUE(contains(error_of([&] { (void)there.cpu(); }), "launch failure on cuda:1"));
  simulated_cuda_recover();
  simulated_cuda_fail("memory@1:1");
  EXPECT_THROW((void)torch::empty({4}, gpu(1)), c10::OutOfMemoryError);
  EXPECT_EQ(simulated_cuda_fail("operator@1"), -1);
}

TEST_F(SimulatedSettings, hang_until_they_recover) {
  const Tensor there = torch::ones({4}, gpu(1));
  simulated_cuda_fail("hang@1:1");
  there.add_(1);
  auto sum = std::async(std::launch::async, [&] { return there.sum().item<float>(); });
  EXPECT_EQ(sum.wait_for(50ms), std::future_status::timeout);
  simulated_cuda_recover();
  EXPECT_EQ(sum.get(), 8);
}

TEST(SimulatedGpusDeathTest, trap_a_host_that_touches_device_memory) {
  const Tensor there = torch::ones({4}, gpu(0));
  EXPECT_EXIT(std::printf("%f", static_cast<double>(*there.const_data_ptr<float>())),
              ::testing::KilledBySignal(SIGSEGV), "");
}

TEST(SimulatedGpusDeathTest, refuse_libtorch_cuda) {
  EXPECT_EXIT(::dlopen("libtorch_cuda.so", RTLD_NOW), ::testing::ExitedWithCode(1), "libtorch_cuda is loaded");
}

}  // namespace
}  // namespace lockstep
