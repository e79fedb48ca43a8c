// SPDX-License-Identifier: Apache-2.0
#include "lockstep/base/sockets/endpoint.h"

#include <netinet/in.h>

#include <algorithm>
#include <array>
#include <future>
#include <thread>

#include "lockstep/base/sockets/poll.h"
#include "lockstep/error.h"

namespace lockstep {
namespace {

in_port_t& port_in(sockaddr* address) {
  return address->sa_family == AF_INET6 ? reinterpret_cast<sockaddr_in6*>(address)->sin6_port
                                        : reinterpret_cast<sockaddr_in*>(address)->sin_port;
}

std::vector<const addrinfo*> each_of(const AddressList& addresses) {
  std::vector<const addrinfo*> each;
  for (const addrinfo* one = addresses.get(); one != nullptr; one = one->ai_next) each.push_back(one);
  return each;
}

Lookup resolve(const Endpoint& endpoint, const addrinfo& hints) {
  addrinfo* found = nullptr;
  const int failed = ::getaddrinfo(endpoint.host.c_str(), std::to_string(endpoint.port).c_str(), &hints, &found);
  return {failed, AddressList(found)};
}

// 0: it is connected.
int error_of(int fd) {
  int error = 0;
  socklen_t size = sizeof error;
  return ::getsockopt(fd, SOL_SOCKET, SO_ERROR, &error, &size) == 0 ? error : errno;
}

}  // namespace

std::optional<Endpoint> endpoint_in(std::string text, int port) {
  constexpr int kLastPort = 65535;
  const size_t colon = text.rfind(':');
  if (colon != std::string::npos && text.find(']', colon) == std::string::npos) {
    if (!parse_int(std::string_view(text).substr(colon + 1), port)) return std::nullopt;
    text.resize(colon);
  }
  if (text.starts_with('[') && text.ends_with(']')) text = text.substr(1, text.size() - 2);
  if (text.empty() || port < 0 || port > kLastPort) return std::nullopt;
  return Endpoint{std::move(text), port};
}

// getaddrinfo has no deadline (a name server that does not answer), so it gets a thread, which is left behind if it hangs.
Lookup look_up(const Endpoint& endpoint, const Deadline& deadline) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  std::packaged_task<Lookup()> task([endpoint, hints] { return resolve(endpoint, hints); });
  auto result = task.get_future();
  std::thread(std::move(task)).detach();
  if (result.wait_for(deadline.left()) != std::future_status::ready) return {EAI_INPROGRESS, nullptr};
  return result.get();
}

void set_port(const AddressList& addresses, int port) {
  for (const addrinfo* address : each_of(addresses)) port_in(address->ai_addr) = htons(static_cast<uint16_t>(port));
}

std::string numeric(const sockaddr* address, socklen_t length) {
  std::array<char, NI_MAXHOST> text{};
  if (::getnameinfo(address, length, text.data(), text.size(), nullptr, 0, NI_NUMERICHOST) != 0)
    throw system_error("write down", "a network address");
  return text.data();
}

Endpoint endpoint_of(int fd) {
  sockaddr_storage address{};
  socklen_t length = sizeof address;
  if (::getsockname(fd, reinterpret_cast<sockaddr*>(&address), &length) != 0)
    throw system_error("read the address of", "a socket");
  auto* const generic = reinterpret_cast<sockaddr*>(&address);
  return {numeric(generic, length), ntohs(port_in(generic))};
}

AddressList address_of_number(const Endpoint& endpoint) {
  addrinfo hints{};
  hints.ai_flags = AI_NUMERICHOST | AI_NUMERICSERV;
  hints.ai_socktype = SOCK_STREAM;
  return resolve(endpoint, hints).addresses;
}

bool bind_to(const UniqueFd& fd, const addrinfo& address) {
  const int yes = 1;
  return ::setsockopt(fd.get(), SOL_SOCKET, SO_REUSEADDR, &yes, sizeof yes) == 0 &&
         ::bind(fd.get(), address.ai_addr, address.ai_addrlen) == 0;
}

UniqueFd listen_at(const AddressList& addresses) {
  int error = ENOENT;
  for (const addrinfo* address : each_of(addresses)) {
    UniqueFd fd(::socket(address->ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0));
    if (fd && bind_to(fd, *address) && ::listen(fd.get(), SOMAXCONN) == 0) return fd;
    error = errno;  // closing may change it
  }
  errno = error;
  return {};
}

std::optional<Connection> connect_to(const AddressList& addresses, const Deadline& deadline) {
  std::vector<Connection> attempts;
  int error = ENOENT;
  for (const addrinfo* address : each_of(addresses)) {
    Connection attempt{UniqueFd(::socket(address->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0)), ""};
    error = errno;
    if (!attempt.fd) continue;
    attempt.address = numeric(address->ai_addr, address->ai_addrlen);
    if (::connect(attempt.fd.get(), address->ai_addr, address->ai_addrlen) == 0) return attempt;
    error = errno;
    if (error == EINPROGRESS) attempts.push_back(std::move(attempt));
  }
  std::vector<pollfd> waiting;
  for (const Connection& attempt : attempts) waiting.push_back(to_poll(attempt.fd.get(), POLLOUT));
  while (!waiting.empty() && poll_until(waiting, deadline) > 0) {
    for (const pollfd& socket : waiting) {
      if (socket.revents == 0) continue;
      error = error_of(socket.fd);
      if (error == 0)
        return std::move(*std::ranges::find(attempts, socket.fd, [](const Connection& one) { return one.fd.get(); }));
    }
    std::erase_if(waiting, [](const pollfd& socket) { return socket.revents != 0; });
  }
  attempts.clear();  // closing may change errno
  errno = waiting.empty() ? error : ETIMEDOUT;
  return std::nullopt;
}

std::optional<std::string> own_address_towards(const AddressList& addresses) {
  for (const addrinfo* address : each_of(addresses)) {
    const UniqueFd fd(::socket(address->ai_family, SOCK_DGRAM | SOCK_CLOEXEC, 0));
    // Connecting a datagram socket sends nothing: it only makes the kernel choose the route.
    if (fd && ::connect(fd.get(), address->ai_addr, address->ai_addrlen) == 0) return endpoint_of(fd.get()).host;
  }
  return std::nullopt;
}

}  // namespace lockstep
