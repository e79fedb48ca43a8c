// SPDX-License-Identifier: Apache-2.0
#include "lockstep/launch/line_channel.h"

#include <array>

#include "lockstep/base/sockets/poll.h"

namespace lockstep {

std::optional<std::string> LineChannel::take() {
  std::array<char, kLongest> room{};
  for (;;) {
    if (const std::size_t end = come_.find('\n'); end != std::string::npos) {
      std::string line = come_.substr(0, end);
      come_.erase(0, end + 1);
      return line;
    }
    lost_ = lost_ || come_.size() > longest_;
    const auto bytes = lost_ ? std::nullopt : channel_->read(room);
    lost_ = !bytes;
    if (lost_ || *bytes == 0) return std::nullopt;
    come_.append(room.data(), *bytes);
  }
}

std::optional<std::string> LineChannel::read(const Deadline& deadline) {
  for (;;) {
    if (auto line = take()) return line;
    if (lost_ || !wait_for(events(), fd(), deadline)) return std::nullopt;
  }
}

bool LineChannel::write(const std::string& line, const Deadline& deadline) {
  std::string rest = line + "\n";
  while (!rest.empty()) {
    const auto bytes = channel_->write(rest);
    lost_ = !bytes;
    if (lost_) return false;
    rest.erase(0, *bytes);
    if (*bytes == 0 && !wait_for(channel_->events(/*has_to_write=*/true), fd(), deadline)) return false;
  }
  return true;
}

}  // namespace lockstep
