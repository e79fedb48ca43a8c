// SPDX-License-Identifier: Apache-2.0
#include "bench/collectives/loopback.h"

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <unistd.h>

#include <thread>

#include "bench/harness.h"
#include "bench/tcp.h"
#include "lockstep/deadline.h"

namespace lockstep::bench {
namespace {

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

double loopback_round_trip() {
  const auto here = [](const std::function<void()>& body) { body(); };
  const TcpConnection ends = connect_over_tcp("127.0.0.1", here, here);
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

}  // namespace lockstep::bench
