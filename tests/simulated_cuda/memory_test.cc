// SPDX-License-Identifier: Apache-2.0
// Memory of simulated GPUs: its limit, its owner, what is in it before and after.
#include <c10/core/CachingDeviceAllocator.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "tests/simulated_cuda/four_gpus.h"
#include "tests/support.h"

namespace lockstep {
namespace {

using lockstep::testing::contains;
using torch::Tensor;

constexpr size_t kMiB = size_t{1} << 20;

class SimulatedMemory : public ::testing::Test {
 protected:
  void TearDown() override { simulated_cuda_limit(2, 16384 * kMiB); }
};

TEST_F(SimulatedMemory, is_out_above_the_limit) {
  simulated_cuda_limit(2, 10 * kMiB);
  const Tensor first = torch::zeros({6 << 20}, torch::dtype(torch::kByte).device(gpu(2)));
  try {
    (void)torch::zeros({6 << 20}, torch::dtype(torch::kByte).device(gpu(2)));
    FAIL() << "no error";
  } catch (const c10::OutOfMemoryError& error) {
    EXPECT_TRUE(contains(error.what(), "CUDA out of memory. Tried to allocate 6291456 bytes"));
  }
  (void)torch::zeros({4 << 20}, torch::dtype(torch::kByte).device(gpu(2)));
}

TEST_F(SimulatedMemory, is_counted_and_free_again) {
  simulated_cuda_limit(2, 10 * kMiB);
  simulated_cuda_reset_counters();
  for (int i = 0; i < 100; ++i) (void)torch::zeros({6 << 20}, torch::dtype(torch::kByte).device(gpu(2)));
  EXPECT_EQ(counted(2).allocated, 0);
  EXPECT_EQ(counted(2).peak, 6 * kMiB);
  const auto [free, total] = c10::getDeviceAllocator(torch::kCUDA)->getMemoryInfo(2);
  EXPECT_EQ(free, 10 * kMiB);
  EXPECT_EQ(total, 10 * kMiB);
}

TEST_F(SimulatedMemory, holds_NaN_after_it_is_freed) {
  Tensor there = torch::ones({100}, gpu(0));
  const Tensor dangling = torch::from_blob(there.data_ptr(), {100}, torch::device(gpu(0)));
  EXPECT_EQ(dangling.sum().item<float>(), 100);
  there.reset();
  const Tensor next = torch::ones({100}, gpu(0));
  EXPECT_TRUE(dangling.isnan().all().item<bool>());
}

TEST_F(SimulatedMemory, of_another_device_is_refused) {
  const Tensor there = torch::ones({100}, gpu(0));
  const Tensor wrong = at::from_blob(
      there.data_ptr(), {100}, [](void*) {}, torch::device(gpu(1)), gpu(1));
  try {
    (void)(wrong * 2);
    FAIL() << "no error";
  } catch (const c10::Error& error) {
    EXPECT_TRUE(contains(error.what(), "on cuda:1 was given memory of cuda:0"));
  }
}

TEST_F(SimulatedMemory, knows_which_device_an_address_is_of) {
  EXPECT_EQ(at::globalContext().getDeviceFromPtr(torch::ones({1}, gpu(3)).data_ptr(), torch::kCUDA), gpu(3));
}

using SimulatedMemoryDeathTest = SimulatedMemory;

TEST_F(SimulatedMemoryDeathTest, traps_a_host_that_touches_it) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_DEATH(
      {
        const Tensor there = torch::ones({1}, gpu(1));
        static_cast<volatile float*>(there.data_ptr())[0] = 2;
      },
      "the host touched memory of cuda:1");
}

TEST_F(SimulatedMemory, is_pinned_where_asked) {
  EXPECT_TRUE(torch::ones({5}).pin_memory().is_pinned());
  EXPECT_TRUE(torch::empty({5}, torch::TensorOptions().pinned_memory(true)).is_pinned());
  EXPECT_FALSE(torch::ones({5}).is_pinned());
}

}  // namespace
}  // namespace lockstep
