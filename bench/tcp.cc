// SPDX-License-Identifier: Apache-2.0
#include "bench/tcp.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <unistd.h>

#include <thread>

#include "bench/harness.h"
#include "lockstep/deadline.h"
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

constexpr int kRoundTrips = 500;

void send_at_once(const UniqueFd& socket) {
  const int yes = 1;
  require_measured(::setsockopt(socket.get(), IPPROTO_TCP, TCP_NODELAY, &yes, sizeof yes) == 0);
}

void echo(const UniqueFd& socket) {
  char byte = 0;
  while (::read(socket.get(), &byte, 1) == 1 && ::write(socket.get(), &byte, 1) == 1) continue;
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

double round_trip(const TcpConnection& ends) {
  send_at_once(ends.from);
  send_at_once(ends.to);
  std::thread other([&] { echo(ends.to); });
  Turns seconds;
  for (int round = 0; round < kRoundTrips; ++round) {
    char byte = 'x';
    const Stopwatch watch;
    const bool fine = ::write(ends.from.get(), &byte, 1) == 1 && ::read(ends.from.get(), &byte, 1) == 1;
    seconds.push_back(watch.seconds());
    if (!fine) break;
  }
  ::shutdown(ends.from.get(), SHUT_RDWR);
  other.join();
  require_measured(seconds.size() == kRoundTrips);
  return median(seconds);
}

TcpConnection connect_on_loopback() {
  const auto here = [](const std::function<void()>& body) { body(); };
  return connect_over_tcp("127.0.0.1", here, here);
}

double loopback_round_trip() { return round_trip(connect_on_loopback()); }

}  // namespace lockstep::bench
