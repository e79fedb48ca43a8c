// SPDX-License-Identifier: Apache-2.0
#include "lockstep/error.h"

#include <gtest/gtest.h>

#include <cerrno>

namespace lockstep {
namespace {

TEST(Error, writes_its_parts_under_each_other) {
  const PeerLost error(
      {.what = "rank 2 died", .here = "rank 0 of 4", .peer = "rank 2", .likely = "no memory", .next = "--resume"});
  EXPECT_STREQ(error.what(),
               "lockstep: PeerLost: rank 2 died\n"
               "  here:   rank 0 of 4\n"
               "  peer:   rank 2\n"
               "  likely: no memory\n"
               "  next:   --resume");
  EXPECT_EQ(error.kind(), "PeerLost");
}

TEST(Error, leaves_out_what_is_empty) { EXPECT_STREQ(DataError({.what = "w"}).what(), "lockstep: DataError: w"); }

TEST(SystemError, says_what_failed_and_why) {
  errno = ENOENT;
  EXPECT_STREQ(system_error("open", "/x").what(),
               "lockstep: SystemError: can't open /x: No such file or directory\n  here:   /x");
}

TEST(SystemError, names_the_limit_on_open_files) {
  errno = EMFILE;
  const std::string message = system_error("make", "a pipe").what();
  EXPECT_NE(message.find("open files (ulimit -n)"), std::string::npos) << message;
}

}  // namespace
}  // namespace lockstep
