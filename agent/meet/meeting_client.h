// SPDX-License-Identifier: Apache-2.0
// agent/meet/meeting_client.h: one connection to a store.
//
// Flow:    collective/meet/store_client.h, first_machine_store.cc -> here -> packet_stream.h -> store_server.h
// Owns:    the connection; in the process that serves the store also the server
// Threads: any; one request at a time
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <optional>
#include <string>

#include "agent/meet/packet_stream.h"
#include "agent/meet/store_server.h"
#include "lockstep/deadline.h"

namespace lockstep {

class MeetingClient {
 public:
  // Serves a store to whom `admit` lets in, and connects this process. Throws SystemError.
  static std::shared_ptr<MeetingClient> serve(UniqueFd listener, MeetingServer::Admit admit,
                                              std::string own_address = "");

  // Null: the other end is no store, or has not let this process in.
  static std::shared_ptr<MeetingClient> join(std::unique_ptr<Channel> channel, const Deadline& deadline,
                                             std::string own_address = "");

  // Blocks until the store answers. Returns nothing: no answer before the deadline, or the connection is lost; then every later
  // request gets nothing, too.
  std::optional<Packet> ask(const Packet& request, const Deadline& deadline);

  bool is_lost() const { return lost_; }
  bool serves() const { return server_ != nullptr; }
  void stop_listening() const;  // no effect where this process does not serve

  // This machine's address on the way to the others, as a number; "": they are all on this machine.
  const std::string& own_address() const { return own_address_; }

 private:
  MeetingClient(std::unique_ptr<Channel> channel, std::string own_address)
      : own_address_(std::move(own_address)), stream_(std::move(channel)) {}
  std::optional<Packet> exchange(const Packet& request, const Deadline& deadline);

  std::unique_ptr<MeetingServer> server_;
  std::string own_address_;
  std::mutex mutex_;
  PacketStream stream_;
  std::atomic<bool> lost_ = false;
};

using MeetingClientPtr = std::shared_ptr<MeetingClient>;

}  // namespace lockstep
