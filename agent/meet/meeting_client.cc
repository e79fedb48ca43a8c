// SPDX-License-Identifier: Apache-2.0
#include "agent/meet/meeting_client.h"

#include "lockstep/base/sockets/poll.h"

namespace lockstep {

std::optional<Packet> MeetingClient::exchange(const Packet& request, const Deadline& deadline) {
  stream_.put(request);
  for (;;) {
    if (!stream_.write() || !stream_.read()) return std::nullopt;
    if (const auto answer = stream_.next()) return answer;
    if (stream_.is_broken()) return std::nullopt;
    if (!wait_for(stream_.events(), stream_.fd(), deadline)) return std::nullopt;
  }
}

std::optional<Packet> MeetingClient::ask(const Packet& request, const Deadline& deadline) {
  const std::lock_guard lock(mutex_);
  auto answer = lost_ ? std::nullopt : exchange(request, deadline);
  lost_ = !answer.has_value();
  return answer;
}

bool MeetingClient::hello(const Deadline& deadline) {
  const auto answer = ask({.kind = Packet::Kind::kHello}, deadline);
  return answer && answer->kind == Packet::Kind::kDone;
}

}  // namespace lockstep
