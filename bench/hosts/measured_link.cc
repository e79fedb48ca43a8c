// What TCP gets through a link: the rate less the headers, and less what shaping costs.
#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <future>
#include <vector>

#include "bench/hosts/network.h"
#include "lockstep/deadline.h"
#include "lockstep/error.h"

namespace lockstep::bench {
namespace {

constexpr std::chrono::milliseconds kWarmUp{300};
constexpr std::chrono::milliseconds kMeasured{1000};
constexpr timeval kLongestWait{.tv_sec = 5, .tv_usec = 0};

void check(bool fine) {
  if (!fine) throw system_error("measure", "a link between two hosts");
}

UniqueFd tcp_socket() {
  UniqueFd fd(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  check(static_cast<bool>(fd));
  check(::setsockopt(fd.get(), SOL_SOCKET, SO_RCVTIMEO, &kLongestWait, sizeof kLongestWait) == 0 &&
        ::setsockopt(fd.get(), SOL_SOCKET, SO_SNDTIMEO, &kLongestWait, sizeof kLongestWait) == 0);
  return fd;
}

// A socket lives in the network of the thread that made it.
struct Connection {
  UniqueFd from;
  UniqueFd to;
};

Connection connect(const Network& network, int from, int to) {
  UniqueFd listener;
  sockaddr_in address{};
  auto* const any = reinterpret_cast<sockaddr*>(&address);
  socklen_t length = sizeof address;
  address.sin_family = AF_INET;
  check(::inet_pton(AF_INET, network.address(to).c_str(), &address.sin_addr) == 1);
  network.host(to).run([&] {
    listener = tcp_socket();
    check(::bind(listener.get(), any, length) == 0 && ::listen(listener.get(), 1) == 0);
    check(::getsockname(listener.get(), any, &length) == 0);
  });
  Connection both;
  network.host(from).run([&] {
    both.from = tcp_socket();
    check(::connect(both.from.get(), any, length) == 0);
  });
  both.to.reset(::accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC));
  check(static_cast<bool>(both.to));
  return both;
}

void send_until(const UniqueFd& socket, Deadline end) {
  const std::vector<char> data(std::size_t{256} << 10);
  while (!end.passed()) check(::send(socket.get(), data.data(), data.size(), MSG_NOSIGNAL) > 0);
  ::shutdown(socket.get(), SHUT_WR);
}

// Bytes per second after the warm-up, when TCP has found its window.
double receive_to_end(const UniqueFd& socket) {
  std::vector<char> data(std::size_t{256} << 10);
  const Deadline warm = Deadline::after(kWarmUp);
  while (!warm.passed()) check(::recv(socket.get(), data.data(), data.size(), 0) > 0);
  const Stopwatch watch;
  double bytes = 0;
  for (ssize_t got = 1; got > 0; bytes += static_cast<double>(got)) {
    got = ::recv(socket.get(), data.data(), data.size(), 0);
    check(got >= 0);
  }
  return bytes / watch.seconds();
}

}  // namespace

double measured_bytes_per_second(const Network& network) {
  const std::array<Connection, 2> directions{connect(network, 0, 1), connect(network, 1, 0)};
  std::vector<std::future<void>> senders;
  std::vector<std::future<double>> receivers;
  const Deadline end = Deadline::after(kWarmUp + kMeasured);
  for (const Connection& one : directions) {
    senders.push_back(std::async(std::launch::async, [&one, end] { send_until(one.from, end); }));
    receivers.push_back(std::async(std::launch::async, [&one] { return receive_to_end(one.to); }));
  }
  for (auto& sender : senders) sender.get();
  const double there = receivers[0].get();
  return std::min(there, receivers[1].get());
}

}  // namespace lockstep::bench
