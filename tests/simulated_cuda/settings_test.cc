// SPDX-License-Identifier: Apache-2.0
// What the environment says to simulated GPUs, in processes of their own.
#include <dlfcn.h>
#include <gtest/gtest.h>
#include <torch/torch.h>
#include <unistd.h>

#include <cstdlib>
#include <fstream>
#include <iostream>
#include <sstream>

#include "tests/simulated_cuda/four_gpus.h"
#include "tests/support.h"

namespace lockstep {
namespace {

using lockstep::testing::contains;

// The process of a death test starts anew with the environment of this one.
class SimulatedSettingsDeathTest : public ::testing::Test {
 protected:
  void SetUp() override { GTEST_FLAG_SET(death_test_style, "threadsafe"); }
  void TearDown() override {
    for (const char* const variable :
         {"CUDA_VISIBLE_DEVICES", "LOCKSTEP_SIMULATED_COUNTERS", "LOCKSTEP_SIMULATED_FAULTS"})
      ::unsetenv(variable);
  }
};

TEST_F(SimulatedSettingsDeathTest, hide_devices_as_cuda_does) {
  ::setenv("CUDA_VISIBLE_DEVICES", "2,0,7,1", 1);
  EXPECT_EXIT(::_exit(gpus().deviceCount()), ::testing::ExitedWithCode(2), "");
}

TEST_F(SimulatedSettingsDeathTest, bring_faults) {
  ::setenv("LOCKSTEP_SIMULATED_FAULTS", "operator@1:2", 1);
  EXPECT_EXIT(
      try { (void)torch::ones({3}, gpu(1)).exp().exp(); } catch (const c10::AcceleratorError& error) {
        std::cerr << error.what() << std::endl;
        ::_exit(3);
      },
      ::testing::ExitedWithCode(3), "simulated: aten::exp");
}

TEST_F(SimulatedSettingsDeathTest, write_counters_when_the_process_ends) {
  const std::string file = ::testing::TempDir() + "counters." + std::to_string(::getppid());
  ::setenv("LOCKSTEP_SIMULATED_COUNTERS", file.c_str(), 0);
  EXPECT_EXIT(
      {
        (void)torch::ones({3}).to(gpu(1));
        ::_exit(0);
      },
      ::testing::ExitedWithCode(0), "");
  std::ostringstream text;
  text << std::ifstream(std::getenv("LOCKSTEP_SIMULATED_COUNTERS")).rdbuf();
  EXPECT_TRUE(contains(text.str(), "\"device\": 1, \"host_to_device\": 12,"));
  ::unlink(std::getenv("LOCKSTEP_SIMULATED_COUNTERS"));
}

TEST_F(SimulatedSettingsDeathTest, refuse_libtorch_cuda) {
  EXPECT_EXIT(::dlopen("libtorch_cuda.so", RTLD_NOW), ::testing::ExitedWithCode(1), "libtorch_cuda is loaded");
}

}  // namespace
}  // namespace lockstep
