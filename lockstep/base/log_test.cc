// SPDX-License-Identifier: Apache-2.0
#include "lockstep/base/log.h"

#include <gtest/gtest.h>

namespace lockstep {
namespace {

TEST(Log, writes_to_stderr_from_its_level_on_with_the_rank) {
  set_log_rank(1, 4);
  ::testing::internal::CaptureStderr();
  log_debug("not this");
  log_warning("but {this}");
  EXPECT_EQ(::testing::internal::GetCapturedStderr(), "lockstep: rank 1 of 4: warning: but {this}\n");
  set_log_rank(0, 1);
}

}  // namespace
}  // namespace lockstep
