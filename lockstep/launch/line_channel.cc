// SPDX-License-Identifier: Apache-2.0
#include "lockstep/launch/line_channel.h"

#include <sys/socket.h>

#include <array>
#include <cerrno>

#include "lockstep/base/sockets/poll.h"

namespace lockstep {

LineChannel::~LineChannel() {
  if (channel_) ::shutdown(channel_->fd(), SHUT_RDWR);
}

void LineChannel::move() {
  while (!gone_ && !out_.empty()) {
    const auto bytes = channel_->write(out_);
    gone_ = !bytes;
    if (gone_ || *bytes == 0) break;
    out_.erase(0, *bytes);
  }
  std::array<char, 4096> room{};
  while (!gone_ && !finishing_) {
    const auto bytes = channel_->read(room);
    gone_ = !bytes || in_.size() > longest_;
    if (gone_ || *bytes == 0) break;
    in_.append(room.data(), *bytes);
  }
}

std::optional<std::string> LineChannel::take() {
  const std::size_t end = in_.find('\n');
  if (end == std::string::npos) return std::nullopt;
  std::string line = in_.substr(0, end);
  in_.erase(0, end + 1);
  return line;
}

std::optional<std::string> LineChannel::read(const Deadline& deadline) {
  for (;;) {
    move();
    if (auto line = take()) return line;
    if (is_gone() || !wait_for(events(), fd(), deadline)) return std::nullopt;
  }
}

bool LineChannel::write(const std::string& line, const Deadline& deadline) {
  write(line);
  for (move(); !gone_ && !out_.empty(); move())
    if (!wait_for(events(), fd(), deadline)) break;
  return out_.empty();
}

void LineChannel::say_end() {
  move();
  ::shutdown(channel_->fd(), SHUT_WR);
}

bool LineChannel::drain() {
  std::array<char, 4096> room{};
  ssize_t bytes = 0;
  while ((bytes = ::recv(channel_->fd(), room.data(), room.size(), MSG_DONTWAIT)) > 0) {
  }
  return bytes < 0 && (errno == EAGAIN || errno == EINTR);
}

}  // namespace lockstep
