// SPDX-License-Identifier: Apache-2.0
// GPUs counted by a child process: what the driver says, and a driver that hangs.
#include "lockstep/collective/gpus.h"

#include <gtest/gtest.h>

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

}  // namespace
}  // namespace lockstep
