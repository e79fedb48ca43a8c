// SPDX-License-Identifier: Apache-2.0
// What simulated GPUs count, and copies between them.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "tests/simulated_cuda/four_gpus.h"

extern "C" int cudaDeviceCanAccessPeer(int* can, int device, int peer);

namespace lockstep {
namespace {

using torch::Tensor;

TEST(SimulatedCounters, count_bytes_by_their_way) {
  const Tensor host = torch::ones({100});
  simulated_cuda_reset_counters();
  const Tensor one = host.to(gpu(0));
  const Tensor other = one.to(gpu(1));
  (void)other.to(torch::kCPU, torch::kFloat64);
  EXPECT_EQ(counted(0).host_to_device, 400);
  EXPECT_EQ(counted(0).device_to_device, 400);
  EXPECT_EQ(counted(1).device_to_host, 400);  // converted on the host
  EXPECT_EQ(counted().copies, 3);
  EXPECT_EQ(counted(1).host_waits, 1);
}

TEST(SimulatedCounters, count_no_copy_for_an_operator) {
  const Tensor there = torch::ones({100}, gpu(0));
  simulated_cuda_reset_counters();
  (void)(there + there).exp();
  EXPECT_EQ(counted(0).copies, 0);
  EXPECT_EQ(counted(0).host_waits, 0);
  EXPECT_EQ(counted(0).operators, 2);
}

TEST(SimulatedCounters, count_a_copy_and_a_wait_for_an_item) {
  const Tensor there = torch::ones({1}, gpu(0));
  simulated_cuda_reset_counters();
  (void)there.item<float>();
  EXPECT_EQ(counted(0).device_to_host, 4);
  EXPECT_EQ(counted(0).host_waits, 1);
}

bool reaches(int device, int peer) {
  int can = 0;
  EXPECT_EQ(cudaDeviceCanAccessPeer(&can, device, peer), 0);
  return can != 0;
}

TEST(SimulatedCounters, count_copies_without_peer_access_as_staged) {
  const Tensor there = torch::ones({100}, gpu(2));
  EXPECT_TRUE(reaches(2, 3));
  simulated_cuda_peer_access(2, 3, 0);
  simulated_cuda_reset_counters();
  EXPECT_EQ(there.to(gpu(3)).sum().item<float>(), 100);
  EXPECT_FALSE(reaches(2, 3));
  EXPECT_TRUE(reaches(3, 2));
  EXPECT_EQ(counted(2).staged, 400);
  EXPECT_EQ(counted(2).device_to_device, 0);
  simulated_cuda_peer_access(2, 3, 1);
}

}  // namespace
}  // namespace lockstep
