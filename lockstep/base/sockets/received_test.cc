// SPDX-License-Identifier: Apache-2.0
#include "lockstep/base/sockets/received.h"

#include <limits>

#include "tests/support.h"

namespace lockstep {
namespace {

using testing::contains;
using testing::message_of;

constexpr int64_t kHuge = std::numeric_limits<int64_t>::max();
const Received kFromRank3("rank 3");

TEST(ReceivedNumber, is_returned_within_its_range) {
  EXPECT_EQ(kFromRank3.in(-1, -1, 4, "dtype"), -1);
  EXPECT_EQ(kFromRank3.in(4, -1, 4, "dtype"), 4);
  EXPECT_EQ(kFromRank3.bytes(3, 8, "a tensor"), 24);
}

TEST(ReceivedNumber, is_an_error_outside_its_range) {
  for (const int64_t wrong : {int64_t{-2}, int64_t{5}, kHuge}) {
    const std::string message = message_of<MismatchError>([&] { kFromRank3.in(wrong, -1, 4, "dtype"); });
    EXPECT_TRUE(contains(message, "dtype is " + std::to_string(wrong) + ", but must be -1 to 4"));
    EXPECT_TRUE(contains(message, "rank 3"));
  }
  for (const int64_t wrong : {int64_t{-1}, kHuge, kHuge / 8, kHuge / 16})
    message_of<MismatchError>([&] { kFromRank3.bytes(wrong, 8, "a tensor"); });
}

}  // namespace
}  // namespace lockstep
