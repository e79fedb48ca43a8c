// SPDX-License-Identifier: Apache-2.0
#include "bench/tcp.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include "lockstep/error.h"

namespace lockstep::bench {
namespace {

constexpr timeval kLongestWait{.tv_sec = 5, .tv_usec = 0};

UniqueFd tcp_socket() {
  UniqueFd fd(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  require_measured(static_cast<bool>(fd));
  require_measured(::setsockopt(fd.get(), SOL_SOCKET, SO_RCVTIMEO, &kLongestWait, sizeof kLongestWait) == 0 &&
                   ::setsockopt(fd.get(), SOL_SOCKET, SO_SNDTIMEO, &kLongestWait, sizeof kLongestWait) == 0);
  return fd;
}

}  // namespace

void require_measured(bool fine) {
  if (!fine) throw system_error("measure", "a TCP connection");
}

TcpConnection connect_over_tcp(const std::string& address, const InNetwork& from, const InNetwork& to) {
  UniqueFd listener;
  sockaddr_in name{};
  auto* const any = reinterpret_cast<sockaddr*>(&name);
  socklen_t length = sizeof name;
  name.sin_family = AF_INET;
  require_measured(::inet_pton(AF_INET, address.c_str(), &name.sin_addr) == 1);
  to([&] {
    listener = tcp_socket();
    require_measured(::bind(listener.get(), any, length) == 0 && ::listen(listener.get(), 1) == 0);
    require_measured(::getsockname(listener.get(), any, &length) == 0);
  });
  TcpConnection both;
  from([&] {
    both.from = tcp_socket();
    require_measured(::connect(both.from.get(), any, length) == 0);
  });
  both.to.reset(::accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC));
  require_measured(static_cast<bool>(both.to));
  return both;
}

}  // namespace lockstep::bench
