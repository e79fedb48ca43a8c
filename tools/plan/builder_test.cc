// SPDX-License-Identifier: Apache-2.0
#include "tools/plan/builder.h"

#include <gtest/gtest.h>

namespace lockstep::plan {
namespace {

// Ready, or the header: 48 + 22 of TLS + 66 of TCP, IP and Ethernet. The data: 24 + 22 + 66.
TEST(BytesOnWire, OfASmallMessageAreMostlyHeaders) {
  EXPECT_EQ(bytes_on_wire(24).there, 136 + 112);
  EXPECT_EQ(bytes_on_wire(24).back, 136);
}

// 1,448,000 bytes in 89 records: 1,449,958, which take 1,002 segments, every second of which is acknowledged.
TEST(BytesOnWire, OfALargeMessageHaveHeadersForEachRecordAndSegment) {
  EXPECT_EQ(bytes_on_wire(1'448'000).there, 136 + 1'449'958 + 1'002 * 66);
  EXPECT_EQ(bytes_on_wire(1'448'000).back, 136 + 501 * 66);
}

}  // namespace
}  // namespace lockstep::plan
