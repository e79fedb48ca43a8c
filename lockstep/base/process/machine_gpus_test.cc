// SPDX-License-Identifier: Apache-2.0
#include "lockstep/base/process/machine_gpus.h"

#include <gtest/gtest.h>

#include <fstream>

#include "tests/support.h"

namespace lockstep {
namespace {

TEST(MachineGpus, are_there_if_one_has_a_file_whatever_its_number) {
  const testing::TempFolder folder;
  const auto make = [&](const std::string& name) { std::ofstream file(folder / name); };
  EXPECT_FALSE(machine_has_gpus(folder / "nowhere"));
  EXPECT_FALSE(machine_has_gpus(folder / ""));
  for (const char* other : {"nvidia", "nvidiactl", "nvidia-uvm", "nvidia0a", "sda1"}) make(other);
  EXPECT_FALSE(machine_has_gpus(folder / ""));
  make("nvidia13");
  EXPECT_TRUE(machine_has_gpus(folder / ""));
}

}  // namespace
}  // namespace lockstep
