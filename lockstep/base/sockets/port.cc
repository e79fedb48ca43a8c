// SPDX-License-Identifier: Apache-2.0
#include "lockstep/base/sockets/port.h"

#include <netinet/in.h>

#include <fstream>

#include <fmt/format.h>

#include "lockstep/base/sockets/endpoint.h"
#include "lockstep/error.h"

namespace lockstep {
bool is_loopback(std::string_view host) { return host == "localhost" || host == "::1" || host.starts_with("127."); }

std::optional<uid_t> user_of_other_end(int fd) {
  sockaddr_in own{}, other{};
  socklen_t length = sizeof own;
  if (::getsockname(fd, reinterpret_cast<sockaddr*>(&own), &length) != 0 ||
      ::getpeername(fd, reinterpret_cast<sockaddr*>(&other), &length) != 0)
    return std::nullopt;
  const auto text_of = [](const sockaddr_in& end) {
    return fmt::format("{:08X}:{:04X}", end.sin_addr.s_addr, ntohs(end.sin_port));
  };
  const std::string here = text_of(own), there = text_of(other);
  std::ifstream table("/proc/net/tcp");
  for (std::string line; std::getline(table, line);) {
    // Number, local address:port, remote one, state, queues, timer, retransmits, user.
    std::string skipped, local, remote, state;
    uid_t user = 0;  // of connections in other states it is not told
    std::istringstream(line) >> skipped >> local >> remote >> state >> skipped >> skipped >> skipped >> user;
    if (local == there && remote == here) return state == "01" ? std::optional(user) : std::nullopt;
  }
  return std::nullopt;
}

ReservedPort::ReservedPort(const std::string& address) {
  const AddressList found = address_of_number({address, 0});
  if (!found) throw SystemError({.what = concat("can't reserve a port on ", address, ", which is not an address")});
  fd_.reset(::socket(found->ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0));
  if (!fd_ || !bind_to(fd_, *found)) throw system_error("reserve", concat("a port on ", address));
  number_ = endpoint_of(fd_.get()).port;
}

}  // namespace lockstep
