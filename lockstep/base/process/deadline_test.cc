// SPDX-License-Identifier: Apache-2.0
#include "lockstep/deadline.h"

#include <gtest/gtest.h>

#include <limits>

namespace lockstep {
namespace {

TEST(Deadline, leaves_no_more_milliseconds_than_poll_can_count) {
  for (const auto timeout : {std::chrono::milliseconds(std::chrono::days(25)), std::chrono::milliseconds::max()}) {
    const auto left = Deadline::after(timeout).left();
    EXPECT_GT(left, std::chrono::days(23));
    EXPECT_LE(left.count(), std::numeric_limits<int>::max());
  }
}

}  // namespace
}  // namespace lockstep
