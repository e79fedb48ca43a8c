// SPDX-License-Identifier: Apache-2.0
// Simulated GPUs that fail, hang or are out of memory when a test says so.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <future>

#include "tests/simulated_cuda/four_gpus.h"
#include "tests/support.h"

namespace lockstep {
namespace {

using lockstep::testing::contains;
using torch::Tensor;

class SimulatedFaults : public ::testing::Test {
 protected:
  void TearDown() override { simulated_cuda_recover(); }
  const Tensor there_ = torch::ones({4}, gpu(1));
};

TEST_F(SimulatedFaults, fail_the_nth_operator_and_all_after_it) {
  ASSERT_EQ(simulated_cuda_fail("operator@1:3"), 0);
  (void)there_.exp();
  (void)there_.exp();
  try {
    (void)there_.exp();
    FAIL() << "no error";
  } catch (const c10::AcceleratorError& error) {
    EXPECT_TRUE(contains(error.what(), "CUDA error"));
    EXPECT_TRUE(contains(error.what(), "cuda:1"));
  }
  EXPECT_THROW((void)there_.cpu(), c10::AcceleratorError);
  EXPECT_THROW(gpus().synchronizeStream(gpus().getStream(gpu(1))), c10::AcceleratorError);
  (void)torch::ones({4}, gpu(0)).exp();
}

TEST_F(SimulatedFaults, fail_the_nth_copy) {
  ASSERT_EQ(simulated_cuda_fail("copy@1:2"), 0);
  (void)there_.cpu();
  EXPECT_THROW((void)there_.to(gpu(0)), c10::AcceleratorError);
}

TEST_F(SimulatedFaults, end_memory_at_the_nth_allocation_once) {
  ASSERT_EQ(simulated_cuda_fail("memory@1:2"), 0);
  (void)torch::empty({4}, gpu(1));
  EXPECT_THROW((void)torch::empty({4}, gpu(1)), c10::OutOfMemoryError);
  (void)torch::empty({4}, gpu(1));
}

TEST_F(SimulatedFaults, hang_a_device_and_who_waits_for_it) {
  ASSERT_EQ(simulated_cuda_fail("hang@1:1"), 0);
  (void)there_.exp();
  c10::Event event(torch::kCUDA);
  event.record(gpus().getStream(gpu(1)));
  EXPECT_FALSE(event.query());
  event.block(gpus().getStream(gpu(0)));
  EXPECT_FALSE(gpus().queryStream(gpus().getStream(gpu(0))));
  EXPECT_TRUE(gpus().queryStream(gpus().getStream(gpu(2))));
  auto waits = std::async(std::launch::async, [&] { event.synchronize(); });
  EXPECT_EQ(waits.wait_for(std::chrono::milliseconds(20)), std::future_status::timeout);
  simulated_cuda_recover();
  waits.get();
  EXPECT_TRUE(event.query());
}

TEST_F(SimulatedFaults, refuse_what_they_do_not_understand) { EXPECT_EQ(simulated_cuda_fail("operator:3"), -1); }

}  // namespace
}  // namespace lockstep
