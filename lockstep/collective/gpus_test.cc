// SPDX-License-Identifier: Apache-2.0
#include "lockstep/collective/gpus.h"

#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <gtest/gtest.h>

#include <fstream>

#include "tests/support.h"

namespace lockstep {
namespace {

using testing::TempFolder;

std::string hint(const TempFolder& device_files) {
  ::testing::internal::CaptureStderr();
  hint_at_unused_gpus(device_files.path());
  return ::testing::internal::GetCapturedStderr();
}

TEST(UnusedGpus, are_pointed_out_where_this_build_can_use_none) {
  const TempFolder folder;
  EXPECT_EQ(hint(folder), "");
  std::ofstream(folder / "nvidia3");
  const std::string text = hint(folder);
  if (c10::impl::hasDeviceGuardImpl(torch::kCUDA))
    EXPECT_EQ(text, "");
  else
    EXPECT_TRUE(testing::contains(text, "this machine has GPUs, but this lockstep was built without CUDA"));
}

}  // namespace
}  // namespace lockstep
