// SPDX-License-Identifier: Apache-2.0
#include "lockstep/base/text.h"

#include <gtest/gtest.h>

#include <limits>

namespace lockstep {
namespace {

using Parts = std::vector<std::string>;

TEST(Text, concat_writes_anything_that_streams) { EXPECT_EQ(concat("rank ", 3, " of ", 4U, 'x'), "rank 3 of 4x"); }

TEST(Text, join_and_split_are_inverse) {
  for (const char* text : {"", "a", "a,b", ",a,,b,"}) EXPECT_EQ(join(split(text, ','), ","), text);
  EXPECT_EQ(split("a,,b", ','), (Parts{"a", "", "b"}));
  EXPECT_EQ(join({}, ", "), "");
}

TEST(Text, numbers_for_people) {
  EXPECT_EQ(fixed(3.14159, 2), "3.14");
  EXPECT_EQ(human_bytes(0), "0 B");
  EXPECT_EQ(human_bytes(1023), "1023 B");
  EXPECT_EQ(human_bytes(uint64_t{25} << 20), "25.0 MiB");
  EXPECT_EQ(with_thousands(0), "0");
  EXPECT_EQ(with_thousands(999), "999");
  EXPECT_EQ(with_thousands(60000), "60,000");
  EXPECT_EQ(with_thousands(-1234567), "-1,234,567");
  EXPECT_EQ(with_thousands(-123), "-123");
}

TEST(Text, seconds_for_people) {
  EXPECT_EQ(human_seconds(2e-6), "2.0 us");
  EXPECT_EQ(human_seconds(0.0123), "12.3 ms");
  EXPECT_EQ(human_seconds(12.34), "12.3 s");
  EXPECT_EQ(human_seconds(75), "1:15");
  EXPECT_EQ(human_seconds(3599.9), "1:00:00");
  EXPECT_EQ(human_seconds(7325), "2:02:05");
}

TEST(Text, parse_int_takes_a_whole_number_and_nothing_else) {
  int value = 7;
  EXPECT_TRUE(parse_int("-12", value));
  EXPECT_EQ(value, -12);
  EXPECT_TRUE(parse_int("2147483647", value));
  EXPECT_EQ(value, std::numeric_limits<int>::max());
  for (const char* text : {"", " 1", "1 ", "1x", "0x1", "1.0", "+1", "2147483648"})
    EXPECT_FALSE(parse_int(text, value)) << text;
}

}  // namespace
}  // namespace lockstep
