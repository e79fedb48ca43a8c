// SPDX-License-Identifier: Apache-2.0
// GPUs counted by a child process: what the driver says, and a driver that hangs. Copies between GPUs, and to them.
#include "lockstep/collective/gpus.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include "lockstep/data/loader/device_copy.h"
#include "tests/simulated_cuda/four_gpus.h"
#include "tests/support.h"

namespace lockstep {
namespace {

using lockstep::testing::contains;
using lockstep::testing::message_of;
using namespace std::chrono_literals;

TEST(CountedGpus, are_those_of_the_driver) { EXPECT_EQ(cuda_device_count_before_fork(), kGpuCount); }

TEST(CountedGpus, of_a_driver_that_hangs_are_an_error_at_the_deadline) {
  ASSERT_EQ(simulated_cuda_fail("count@0:1"), 0);
  const std::string message = message_of<DeviceError>([] { cuda_device_count_before_fork(200ms); });
  simulated_cuda_recover();
  EXPECT_TRUE(contains(message, "could not be counted: no answer within 200.0 ms")) << message;
}

class CopyBetweenGpus : public ::testing::Test {
 protected:
  void TearDown() override {
    simulated_cuda_recover();
    simulated_cuda_peer_access(1, 0, 1);
  }
  const torch::Tensor on_0_ = torch::ones({4}, gpu(0)), on_1_ = torch::ones({4}, gpu(1));
};

// The GPU that a copy comes from makes it.
TEST_F(CopyBetweenGpus, goes_over_the_host_where_its_source_does_not_reach_the_other) {
  simulated_cuda_peer_access(1, 0, 0);
  simulated_cuda_reset_counters();
  copy_between(on_0_, on_1_);
  EXPECT_EQ(counted(1).device_to_host, 16U);
  EXPECT_EQ(counted(1).staged, 0U);
  simulated_cuda_reset_counters();
  copy_between(on_1_, on_0_);
  EXPECT_EQ(counted(0).device_to_device, 16U);
}

TEST_F(CopyBetweenGpus, that_fails_names_both) {
  ASSERT_EQ(simulated_cuda_fail("copy@1:1"), 0);
  const std::string message = message_of<DeviceError>([&] { copy_between(on_0_, on_1_); });
  EXPECT_TRUE(contains(message, "cuda:0 or cuda:1 failed: CUDA error"));
}

TEST(CopyStream, of_a_gpu_is_one) {
  EXPECT_EQ(copy_stream(gpu(1)), copy_stream(gpu(1)));
  EXPECT_NE(copy_stream(gpu(1)), copy_stream(gpu(2)));
  EXPECT_EQ(copy_stream(torch::kCPU), std::nullopt);
}

}  // namespace
}  // namespace lockstep
