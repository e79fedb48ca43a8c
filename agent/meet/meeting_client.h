// SPDX-License-Identifier: Apache-2.0
// agent/meet/meeting_client.h: one connection to a store.
//
// Flow:    collective/meet/store_client.h, first_machine_store.h -> here -> packet_stream.h -> store_server.h
// Owns:    the connection
// Threads: any; one request at a time
#pragma once

#include <memory>
#include <mutex>
#include <optional>

#include "agent/meet/packet_stream.h"
#include "lockstep/deadline.h"

namespace lockstep {

class MeetingClient {
 public:
  explicit MeetingClient(std::unique_ptr<Channel> channel) : stream_(std::move(channel)) {}

  // Blocks until the store answers. Returns nothing: no answer before the deadline, or the connection is lost; then every later
  // request gets nothing, too.
  std::optional<Packet> ask(const Packet& request, const Deadline& deadline);

  // The first request. False: the other end is no store, or has not let this process in.
  bool hello(const Deadline& deadline);

 private:
  std::optional<Packet> exchange(const Packet& request, const Deadline& deadline);

  std::mutex mutex_;
  PacketStream stream_;
  bool lost_ = false;
};

}  // namespace lockstep
