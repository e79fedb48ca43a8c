// SPDX-License-Identifier: Apache-2.0
#include "lockstep/base/port.h"

#include <arpa/inet.h>
#include <sys/socket.h>
#include <unistd.h>

#include "lockstep/base/text.h"
#include "lockstep/base/unique_fd.h"
#include "tests/support.h"

namespace lockstep {
namespace {

TEST(Port, names_the_process_that_listens) {
  UniqueFd fd(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in address{};
  socklen_t size = sizeof address;
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  ASSERT_EQ(::bind(fd.get(), reinterpret_cast<sockaddr*>(&address), size), 0);
  ASSERT_EQ(::getsockname(fd.get(), reinterpret_cast<sockaddr*>(&address), &size), 0);
  const int port = ntohs(address.sin_port);
  EXPECT_EQ(listener_of_port(port), "");
  ASSERT_EQ(::listen(fd.get(), 1), 0);
  EXPECT_TRUE(testing::contains(listener_of_port(port), concat("pid ", ::getpid(), " (")));
}

}  // namespace
}  // namespace lockstep
