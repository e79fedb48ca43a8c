#include "bench/collectives/loopback.h"

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <unistd.h>

#include <thread>
#include <vector>

#include "bench/report.h"
#include "lockstep/base/unique_fd.h"
#include "lockstep/deadline.h"
#include "lockstep/error.h"

namespace lockstep::bench {
namespace {

constexpr int kRounds = 500;

void check(bool fine) {
  if (!fine) throw system_error("measure", "a connection over loopback");
}

void send_at_once(const UniqueFd& socket) {
  const int yes = 1;
  check(::setsockopt(socket.get(), IPPROTO_TCP, TCP_NODELAY, &yes, sizeof yes) == 0);
}

struct Connection {
  UniqueFd here;
  UniqueFd there;
};

Connection connect_to_self() {
  const UniqueFd listener(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  auto* const any = reinterpret_cast<sockaddr*>(&address);
  socklen_t length = sizeof address;
  check(::bind(listener.get(), any, length) == 0 && ::listen(listener.get(), 1) == 0);
  check(::getsockname(listener.get(), any, &length) == 0);
  Connection ends{UniqueFd(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)), UniqueFd()};
  check(::connect(ends.here.get(), any, length) == 0);
  ends.there.reset(::accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC));
  check(static_cast<bool>(ends.there));
  send_at_once(ends.here);
  send_at_once(ends.there);
  return ends;
}

void echo(const UniqueFd& socket) {
  char byte = 0;
  while (::read(socket.get(), &byte, 1) == 1 && ::write(socket.get(), &byte, 1) == 1) continue;
}

}  // namespace

double loopback_round_trip() {
  Connection ends = connect_to_self();
  std::thread other([&] { echo(ends.there); });
  std::vector<double> seconds;
  for (int round = 0; round < kRounds; ++round) {
    char byte = 'x';
    const Stopwatch watch;
    const bool fine = ::write(ends.here.get(), &byte, 1) == 1 && ::read(ends.here.get(), &byte, 1) == 1;
    seconds.push_back(watch.seconds());
    if (!fine) break;
  }
  ::shutdown(ends.here.get(), SHUT_RDWR);
  other.join();
  check(seconds.size() == kRounds);
  return median(seconds);
}

}  // namespace lockstep::bench
