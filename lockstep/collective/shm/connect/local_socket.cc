// SPDX-License-Identifier: Apache-2.0
#include "lockstep/collective/shm/connect/local_socket.h"

#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>

#include <cerrno>
#include <cstring>

#include "lockstep/error.h"

namespace lockstep::shm {
namespace {

constexpr std::size_t kMostDescriptors = 2;
using ControlBuffer = std::array<std::byte, CMSG_SPACE(sizeof(int) * kMostDescriptors)>;

UniqueFd make_socket() {
  UniqueFd fd(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!fd) throw system_error("make", "a Unix socket");
  return fd;
}

sockaddr_un address_of(const std::string& path) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  if (path.size() >= sizeof address.sun_path)
    throw SystemError({.what = "the path of a socket is too long", .here = path});
  std::memcpy(address.sun_path, path.c_str(), path.size() + 1);
  return address;
}

void take_descriptors(msghdr& header, std::vector<UniqueFd>& descriptors) {
  for (cmsghdr* part = CMSG_FIRSTHDR(&header); part != nullptr; part = CMSG_NXTHDR(&header, part)) {
    if (part->cmsg_level != SOL_SOCKET || part->cmsg_type != SCM_RIGHTS) continue;
    const std::size_t count = (part->cmsg_len - CMSG_LEN(0)) / sizeof(int);
    for (std::size_t i = 0; i < count; ++i) {
      int fd = -1;
      std::memcpy(&fd, CMSG_DATA(part) + i * sizeof(int), sizeof fd);
      descriptors.emplace_back(fd);
    }
  }
}

bool well_formed(const Message& message, ssize_t bytes) {
  const Message expected;
  return bytes == static_cast<ssize_t>(sizeof message) && message.magic == expected.magic &&
         message.version == expected.version;
}

// False: not before the deadline. A socket whose other end is gone is ready, too: the call that follows says so.
bool wait_for(short events, int socket, Deadline deadline) {
  pollfd polled{.fd = socket, .events = events, .revents = 0};
  while (true) {
    const int result = ::poll(&polled, 1, static_cast<int>(deadline.left().count()));
    if (result != 0 && !(result < 0 && errno == EINTR)) return true;
    if (deadline.passed()) return false;
  }
}

}  // namespace

UniqueFd listen_at(const std::string& path) {
  UniqueFd fd = make_socket();
  const sockaddr_un address = address_of(path);
  if (::bind(fd.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address) != 0 ||
      ::listen(fd.get(), SOMAXCONN) != 0)
    throw system_error("listen at", path);
  return fd;
}

UniqueFd connect_to(const std::string& path) {
  UniqueFd fd = make_socket();
  const sockaddr_un address = address_of(path);
  if (::connect(fd.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address) != 0)
    throw system_error("connect to", path);
  return fd;
}

UniqueFd accept_from(int listener) {
  UniqueFd fd(::accept4(listener, nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
  if (!fd && (errno == EMFILE || errno == ENFILE)) throw system_error("accept", "a rank of this machine");
  return fd;
}

bool is_own_user(int socket) {
  ucred other{};
  socklen_t length = sizeof other;
  return ::getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &other, &length) == 0 && other.uid == ::geteuid();
}

bool send_message(int socket, const Message& message, Deadline deadline, const std::vector<int>& descriptors) {
  Message copy = message;
  iovec data{.iov_base = &copy, .iov_len = sizeof copy};
  alignas(cmsghdr) ControlBuffer control{};
  msghdr header{};
  header.msg_iov = &data;
  header.msg_iovlen = 1;
  if (!descriptors.empty()) {
    const std::size_t bytes = descriptors.size() * sizeof(int);
    header.msg_control = control.data();
    header.msg_controllen = CMSG_SPACE(bytes);
    cmsghdr* const part = CMSG_FIRSTHDR(&header);
    part->cmsg_level = SOL_SOCKET;
    part->cmsg_type = SCM_RIGHTS;
    part->cmsg_len = CMSG_LEN(bytes);
    std::memcpy(CMSG_DATA(part), descriptors.data(), bytes);
  }
  while (::sendmsg(socket, &header, MSG_NOSIGNAL) < 0) {
    if (errno == EINTR) continue;
    if (errno != EAGAIN || !wait_for(POLLOUT, socket, deadline)) return false;
  }
  return true;
}

Received receive_message(int socket, Message& message, std::vector<UniqueFd>& descriptors, std::size_t expected) {
  iovec data{.iov_base = &message, .iov_len = sizeof message};
  alignas(cmsghdr) ControlBuffer control{};
  msghdr header{};
  header.msg_iov = &data;
  header.msg_iovlen = 1;
  header.msg_control = control.data();
  header.msg_controllen = control.size();
  const ssize_t bytes = ::recvmsg(socket, &header, MSG_CMSG_CLOEXEC);
  if (bytes < 0) return errno == EAGAIN || errno == EINTR ? Received::kNothingYet : Received::kClosed;
  if (bytes == 0) return Received::kClosed;
  take_descriptors(header, descriptors);
  if (!well_formed(message, bytes) || (header.msg_flags & MSG_TRUNC) != 0) return Received::kGarbage;
  if (descriptors.size() < expected && (header.msg_flags & MSG_CTRUNC) != 0) {
    errno = EMFILE;
    throw system_error("receive", "the descriptors of another rank's memory");
  }
  return descriptors.size() == expected ? Received::kMessage : Received::kGarbage;
}

bool wait_readable(int socket, Deadline deadline) { return wait_for(POLLIN, socket, deadline); }

}  // namespace lockstep::shm
