// SPDX-License-Identifier: Apache-2.0
#include "agent/meet/meeting_client.h"

#include "lockstep/base/sockets/poll.h"

namespace lockstep {

MeetingClientPtr MeetingClient::serve(UniqueFd listener, MeetingServer::Admit admit, std::string own_address) {
  auto server = std::make_unique<MeetingServer>(std::move(listener), std::move(admit));
  const MeetingClientPtr client(
      new MeetingClient(std::make_unique<Channel>(server->own_connection()), std::move(own_address)));
  client->server_ = std::move(server);
  return client;
}

MeetingClientPtr MeetingClient::join(std::unique_ptr<Channel> channel, const Deadline& deadline,
                                     std::string own_address) {
  const MeetingClientPtr client(new MeetingClient(std::move(channel), std::move(own_address)));
  const auto answer = client->ask({.kind = Packet::Kind::kHello}, deadline);
  return answer && answer->kind == Packet::Kind::kDone ? client : nullptr;
}

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

void MeetingClient::stop_listening() const {
  if (server_) server_->stop_listening();
}

}  // namespace lockstep
