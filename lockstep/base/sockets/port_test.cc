// SPDX-License-Identifier: Apache-2.0
#include "lockstep/base/sockets/port.h"

#include <sys/socket.h>
#include <sys/time.h>
#include <unistd.h>

#include <csignal>

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

// A listener that accepts nobody: the kernel answers no more than its queue holds.
TEST(Connecting, goes_on_after_a_signal) {
  const UniqueFd listener(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  ASSERT_EQ(::listen(listener.get(), 0), 0);
  const AddressList full = address_of_number({"127.0.0.1", endpoint_of(listener.get()).port});
  std::vector<UniqueFd> queued;
  while (auto connection = connect_to(full, Deadline::after(milliseconds(50))))
    queued.push_back(std::move(connection->fd));
  struct sigaction ignored {};
  ignored.sa_handler = [](int) {};
  struct sigaction before {};
  ::sigaction(SIGALRM, &ignored, &before);
  const itimerval often{.it_interval = {0, 5000}, .it_value = {0, 5000}};
  ::setitimer(ITIMER_REAL, &often, nullptr);
  const Deadline deadline = Deadline::after(milliseconds(200));
  EXPECT_FALSE(connect_to(full, deadline));
  EXPECT_TRUE(deadline.passed());
  EXPECT_EQ(errno, ETIMEDOUT);
  ::setitimer(ITIMER_REAL, std::array<itimerval, 1>{}.data(), nullptr);
  ::sigaction(SIGALRM, &before, nullptr);
}

}  // namespace
}  // namespace lockstep
