// SPDX-License-Identifier: Apache-2.0
#include "lockstep/base/port.h"

#include <sys/socket.h>
#include <unistd.h>

#include "lockstep/base/text.h"
#include "tests/support.h"

namespace lockstep {
namespace {

TEST(Port, names_the_process_that_listens) {
  const ReservedPort port;
  EXPECT_EQ(listener_of_port(port.number()), "");
  ASSERT_EQ(::listen(port.fd(), 1), 0);
  EXPECT_TRUE(testing::contains(listener_of_port(port.number()), concat("pid ", ::getpid(), " (")));
}

}  // namespace
}  // namespace lockstep
