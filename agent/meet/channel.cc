// SPDX-License-Identifier: Apache-2.0
#include "agent/meet/channel.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/socket.h>

#include <cerrno>

namespace lockstep {
namespace {

std::optional<size_t> moved(ssize_t bytes) {
  if (bytes > 0) return static_cast<size_t>(bytes);
  if (bytes < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR)) return 0;
  return std::nullopt;
}

}  // namespace

Channel::Channel(UniqueFd fd) : fd_(std::move(fd)) {
  ::fcntl(fd_.get(), F_SETFL, ::fcntl(fd_.get(), F_GETFL) | O_NONBLOCK);
}

std::optional<size_t> Channel::read(std::span<char> room) {
  return moved(::recv(fd_.get(), room.data(), room.size(), 0));
}

std::optional<size_t> Channel::write(std::span<const char> bytes) {
  return moved(::send(fd_.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL));
}

short Channel::events(bool has_to_write) const { return static_cast<short>(POLLIN | (has_to_write ? POLLOUT : 0)); }

}  // namespace lockstep
