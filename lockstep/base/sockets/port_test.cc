// SPDX-License-Identifier: Apache-2.0
#include "lockstep/base/sockets/port.h"

#include <sys/socket.h>
#include <unistd.h>

#include "lockstep/base/sockets/endpoint.h"
#include "lockstep/base/text.h"
#include "tests/support.h"

namespace lockstep {
namespace {

TEST(Port, knows_addresses_of_the_loopback_interface) {
  for (const char* host : {"localhost", "::1", "127.0.0.1", "127.0.1.1"}) EXPECT_TRUE(is_loopback(host)) << host;
  for (const char* host : {"10.0.0.1", "::2", "localhost.example", "1.127.0.0", ""})
    EXPECT_FALSE(is_loopback(host)) << host;
}

TEST(Port, knows_who_has_the_other_end_of_a_connection) {
  const UniqueFd listener = listen_at(address_of_number({"127.64.0.7", 0}));
  auto connection =
      connect_to(address_of_number(endpoint_of(listener.get())), Deadline::after(std::chrono::seconds(10)));
  ASSERT_TRUE(connection);
  const UniqueFd accepted(::accept(listener.get(), nullptr, nullptr));
  EXPECT_EQ(user_of_other_end(accepted.get()), ::geteuid());
  EXPECT_EQ(user_of_other_end(connection->fd.get()), ::geteuid());
}

TEST(Connecting, says_why_nobody_answers) {
  const AddressList closed = address_of_number(endpoint_of(listen_at(address_of_number({"127.64.0.7", 0})).get()));
  EXPECT_FALSE(connect_to(closed, Deadline::after(std::chrono::seconds(10))));
  EXPECT_EQ(errno, ECONNREFUSED);
}

}  // namespace
}  // namespace lockstep
