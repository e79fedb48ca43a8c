// SPDX-License-Identifier: Apache-2.0
// What TCP gets through a link: the rate less the headers, and less what shaping costs.
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <future>
#include <vector>

#include "bench/hosts/network.h"
#include "bench/tcp.h"
#include "lockstep/deadline.h"

namespace lockstep::bench {
namespace {

constexpr std::chrono::milliseconds kWarmUp{300};
constexpr std::chrono::milliseconds kMeasured{1000};

TcpConnection connect(const Network& network, int from, int to) {
  const auto in = [&](int host) { return [&network, host](const auto& body) { network.host(host).run(body); }; };
  return connect_over_tcp(network.address(to), in(from), in(to));
}

void send_until(const UniqueFd& socket, Deadline end) {
  const std::vector<char> data(std::size_t{256} << 10);
  while (!end.passed()) require_measured(::send(socket.get(), data.data(), data.size(), MSG_NOSIGNAL) > 0);
  ::shutdown(socket.get(), SHUT_WR);
}

// Bytes per second after the warm-up, when TCP has found its window.
double receive_to_end(const UniqueFd& socket) {
  std::vector<char> data(std::size_t{256} << 10);
  const Deadline warm = Deadline::after(kWarmUp);
  while (!warm.passed()) require_measured(::recv(socket.get(), data.data(), data.size(), 0) > 0);
  const Stopwatch watch;
  double bytes = 0;
  for (ssize_t got = 1; got > 0; bytes += static_cast<double>(got)) {
    got = ::recv(socket.get(), data.data(), data.size(), 0);
    require_measured(got >= 0);
  }
  return bytes / watch.seconds();
}

}  // namespace

double measured_bytes_per_second(const Network& network) {
  const std::array<TcpConnection, 2> directions{connect(network, 0, 1), connect(network, 1, 0)};
  std::vector<std::future<void>> senders;
  std::vector<std::future<double>> receivers;
  const Deadline end = Deadline::after(kWarmUp + kMeasured);
  for (const TcpConnection& one : directions) {
    senders.push_back(std::async(std::launch::async, [&one, end] { send_until(one.from, end); }));
    receivers.push_back(std::async(std::launch::async, [&one] { return receive_to_end(one.to); }));
  }
  for (auto& sender : senders) sender.get();
  const double there = receivers[0].get();
  return std::min(there, receivers[1].get());
}

}  // namespace lockstep::bench
