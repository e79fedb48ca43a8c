// SPDX-License-Identifier: Apache-2.0
#include "lockstep/base/sockets/local_socket.h"

#include <sys/random.h>
#include <sys/resource.h>
#include <sys/un.h>

#include <algorithm>
#include <cstring>
#include <fstream>
#include <thread>

#include "lockstep/base/sockets/poll.h"
#include "lockstep/base/text.h"
#include "lockstep/error.h"

namespace lockstep {
namespace {

constexpr rlim_t kEnoughDescriptors = 65'536;  // programs that close all that they might have get slow with more

UniqueFd make_local_socket(int type) {
  UniqueFd fd(::socket(AF_UNIX, type | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!fd) throw system_error("make", "a Unix socket");
  return fd;
}

struct LocalAddress {
  explicit LocalAddress(const std::string& text) {
    address.sun_family = AF_UNIX;
    if (text.size() >= sizeof address.sun_path)
      throw SystemError({.what = "the path of a socket is too long", .here = text});
    std::memcpy(address.sun_path, text.data(), text.size());
    bytes = sizeof address;
    if (!text.starts_with('@')) return;
    address.sun_path[0] = '\0';  // and then its length counts
    bytes = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + text.size());
  }
  const sockaddr* get() const { return reinterpret_cast<const sockaddr*>(&address); }

  sockaddr_un address{};
  socklen_t bytes = 0;
};

// The arguments of sendmsg and recvmsg.
struct Envelope {
  explicit Envelope(std::span<std::byte> message) : data{.iov_base = message.data(), .iov_len = message.size()} {
    header.msg_iov = &data;
    header.msg_iovlen = 1;
    header.msg_control = control.data();
    header.msg_controllen = control.size();
  }

  iovec data;
  alignas(cmsghdr) std::array<std::byte, CMSG_SPACE(sizeof(int) * kMostDescriptors)> control{};
  msghdr header{};
};

void take_descriptors(msghdr& header, std::vector<UniqueFd>& descriptors) {
  for (cmsghdr* part = CMSG_FIRSTHDR(&header); part != nullptr; part = CMSG_NXTHDR(&header, part)) {
    if (part->cmsg_level != SOL_SOCKET || part->cmsg_type != SCM_RIGHTS) continue;
    const size_t count = (part->cmsg_len - CMSG_LEN(0)) / sizeof(int);
    for (size_t i = 0; i < count; ++i) {
      int fd = -1;
      std::memcpy(&fd, CMSG_DATA(part) + i * sizeof(int), sizeof fd);
      descriptors.emplace_back(fd);
    }
  }
}

}  // namespace

UniqueFd listen_locally(const std::string& address, int type) {
  UniqueFd fd = make_local_socket(type);
  const LocalAddress local(address);
  if (::bind(fd.get(), local.get(), local.bytes) != 0 || ::listen(fd.get(), SOMAXCONN) != 0)
    throw system_error("listen at", address);
  return fd;
}

UniqueFd connect_locally(const std::string& address, int type, Deadline deadline) {
  UniqueFd fd = make_local_socket(type);
  const LocalAddress local(address);
  while (::connect(fd.get(), local.get(), local.bytes) != 0) {
    if (errno != EAGAIN || deadline.passed()) throw system_error("connect to", address);
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return fd;
}

std::array<UniqueFd, 2> connected_pair(int type) {
  std::array<int, 2> fds{};
  if (::socketpair(AF_UNIX, type | SOCK_CLOEXEC, 0, fds.data()) != 0) throw system_error("make", "a socket");
  return {UniqueFd(fds[0]), UniqueFd(fds[1])};
}

std::string new_local_address(const std::string& prefix) {
  std::array<uint64_t, 2> noise{};
  if (::getrandom(noise.data(), sizeof noise, 0) != sizeof noise) throw system_error("draw", "random numbers");
  return concat(prefix, noise[0], "-", noise[1]);
}

std::vector<std::string> local_listeners(const std::string& prefix) {
  std::vector<std::string> names;
  std::ifstream sockets("/proc/net/unix");
  for (std::string line; std::getline(sockets, line);) {
    const size_t name = line.find(' ' + prefix);
    const bool listens = line.find(" 00010000 ") != std::string::npos;  // its flags
    if (name != std::string::npos && listens) names.push_back(line.substr(name + 1));
  }
  return names;
}

UniqueFd accept_locally(int listener) {
  UniqueFd fd(::accept4(listener, nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
  if (!fd && (errno == EMFILE || errno == ENFILE)) throw system_error("accept", "a rank of this machine");
  return fd;
}

void raise_descriptor_limit() {
  rlimit limit{};
  if (::getrlimit(RLIMIT_NOFILE, &limit) != 0 || limit.rlim_cur >= kEnoughDescriptors) return;
  limit.rlim_cur = std::min(limit.rlim_max, kEnoughDescriptors);
  ::setrlimit(RLIMIT_NOFILE, &limit);
}

std::optional<ucred> peer_of(int socket) {
  ucred peer{};
  socklen_t length = sizeof peer;
  return ::getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &peer, &length) == 0 ? std::optional(peer) : std::nullopt;
}

bool is_own_user(int socket) {
  const auto peer = peer_of(socket);
  return peer && peer->uid == ::geteuid();
}

bool send_with_descriptors(int socket, std::span<const std::byte> message, const std::vector<int>& descriptors,
                           Deadline deadline) {
  Envelope envelope({const_cast<std::byte*>(message.data()), message.size()});  // sendmsg only reads
  const size_t bytes = descriptors.size() * sizeof(int);
  envelope.header.msg_controllen = bytes > 0 ? CMSG_SPACE(bytes) : 0;
  if (cmsghdr* const part = CMSG_FIRSTHDR(&envelope.header)) {
    part->cmsg_level = SOL_SOCKET;
    part->cmsg_type = SCM_RIGHTS;
    part->cmsg_len = CMSG_LEN(bytes);
    std::memcpy(CMSG_DATA(part), descriptors.data(), bytes);
  }
  while (::sendmsg(socket, &envelope.header, MSG_NOSIGNAL) < 0) {
    if (errno == EINTR) continue;
    // A user without privileges may have only so many descriptors (RLIMIT_NOFILE) on their way at a time.
    if (errno == ETOOMANYREFS && !deadline.passed()) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
      continue;
    }
    if (errno != EAGAIN || !wait_for(POLLOUT, socket, deadline)) return false;
  }
  return true;
}

ptrdiff_t receive_with_descriptors(int socket, std::span<std::byte> message, std::vector<UniqueFd>& descriptors,
                                   size_t expected) {
  Envelope envelope(message);
  msghdr& header = envelope.header;
  const ssize_t bytes = ::recvmsg(socket, &header, MSG_CMSG_CLOEXEC);
  if (bytes < 0) return errno == EAGAIN || errno == EINTR ? -1 : 0;
  take_descriptors(header, descriptors);
  if (descriptors.size() < expected && (header.msg_flags & MSG_CTRUNC) != 0) {
    errno = EMFILE;
    throw system_error("receive", "the descriptors of another process's memory");
  }
  return (header.msg_flags & MSG_TRUNC) != 0 ? static_cast<ptrdiff_t>(message.size()) + 1 : bytes;
}

}  // namespace lockstep
