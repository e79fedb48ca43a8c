// SPDX-License-Identifier: Apache-2.0
#include "lockstep/launch/peer_link.h"

#include <sys/socket.h>

#include <array>
#include <cerrno>

namespace lockstep {
namespace {

constexpr std::size_t kMostUnread = std::size_t{1} << 20;  // an epoch of thousands of machines

}  // namespace

PeerLink::~PeerLink() {
  if (channel_) ::shutdown(channel_->fd(), SHUT_RDWR);
}

void PeerLink::move() {
  while (!gone_ && !out_.empty()) {
    const auto bytes = channel_->write(out_);
    gone_ = !bytes;
    if (gone_ || *bytes == 0) break;
    out_.erase(0, *bytes);
  }
  std::array<char, 4096> room{};
  while (!gone_ && !finishing_) {
    const auto bytes = channel_->read(room);
    gone_ = !bytes || in_.size() > kMostUnread;
    if (gone_ || *bytes == 0) break;
    in_.append(room.data(), *bytes);
  }
}

void PeerLink::say_end() {
  move();
  ::shutdown(channel_->fd(), SHUT_WR);
}

bool PeerLink::drain() {
  std::array<char, 4096> room{};
  ssize_t bytes = 0;
  while ((bytes = ::recv(channel_->fd(), room.data(), room.size(), MSG_DONTWAIT)) > 0) {
  }
  return bytes < 0 && (errno == EAGAIN || errno == EINTR);
}

std::optional<std::string> PeerLink::take() {
  const std::size_t end = in_.find('\n');
  if (end == std::string::npos) return std::nullopt;
  std::string line = in_.substr(0, end);
  in_.erase(0, end + 1);
  return line;
}

}  // namespace lockstep
