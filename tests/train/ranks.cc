// SPDX-License-Identifier: Apache-2.0
#include "tests/train/ranks.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>

namespace lockstep::testing {

ReservedPort::ReservedPort() : socket_(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
  const int on = 1;
  sockaddr_in address{};
  socklen_t size = sizeof address;
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  auto* const generic = reinterpret_cast<sockaddr*>(&address);
  EXPECT_EQ(::setsockopt(socket_.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof on), 0);
  EXPECT_EQ(::bind(socket_.get(), generic, size), 0);
  EXPECT_EQ(::getsockname(socket_.get(), generic, &size), 0);
  number_ = ntohs(address.sin_port);
}

Ranks::Ranks(int count, const Words& command, std::map<std::string, std::string> more) {
  more["ASAN_OPTIONS"] = "detect_leaks=0";  // takes seconds at the end of each program, whose end is timed
  more["WORLD_SIZE"] = more["LOCAL_WORLD_SIZE"] = std::to_string(count);
  more["MASTER_ADDR"] = "127.0.0.1";
  more["MASTER_PORT"] = std::to_string(port_.number());
  for (int rank = 0; rank < count; ++rank) {
    more["RANK"] = more["LOCAL_RANK"] = std::to_string(rank);
    children_.push_back(
        std::make_unique<Child>(with_variables(more, command + Words{"--quiet", "--metrics", metrics()})));
  }
}

bool Ranks::have_made(std::size_t steps) const {
  return wait_until([&] { return steps_in(metrics()) >= steps; });
}

}  // namespace lockstep::testing
