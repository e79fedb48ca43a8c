// SPDX-License-Identifier: Apache-2.0
// collective/store/store_client.h: one connection to a store; and the c10d::Store that a job's ranks meet at.
//
// Flow:    rendezvous.h, machine_meeting.h -> here -> packet_stream.h -> store_server.h
// Owns:    the connection; the first rank's also the server
// Threads: any; one request at a time
// Ranks:   each has one
#pragma once

#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "lockstep/collective/store/packet_stream.h"
#include "lockstep/collective/store/store_ptr.h"
#include "lockstep/collective/store/store_server.h"
#include "lockstep/deadline.h"

namespace lockstep {

class MeetingClient {
 public:
  explicit MeetingClient(std::unique_ptr<Channel> channel) : stream_(std::move(channel)) {
    stream_.allow(PacketStream::kLongestPacket);
  }

  // Blocks until the store answers. Throws c10::DistNetworkError: no answer before the deadline, or the connection is
  // lost, from then on for every request; c10::DistStoreError: the store has refused it.
  Packet ask(const Packet& request, const Deadline& deadline);

  // The first request. False: the other end is no store, or has not let this process in.
  bool hello(const Deadline& deadline);

 private:
  std::optional<Packet> exchange(const Packet& request, const Deadline& deadline);

  std::mutex mutex_;
  PacketStream stream_;
  bool lost_ = false;
};

// Its waits look every few milliseconds. Keys are never removed unless a rank asks for it.
class MeetingStore final : public c10d::Store {
 public:
  using Bytes = std::vector<std::uint8_t>;

  MeetingStore(std::shared_ptr<MeetingClient> client, std::shared_ptr<MeetingServer> server, milliseconds timeout,
               std::string host = "")
      : Store(timeout), client_(std::move(client)), server_(std::move(server)), host_(std::move(host)) {}

  using Store::compareSet;
  using Store::set;
  c10::intrusive_ptr<Store> clone() override;  // over the same connection
  void set(const std::string& key, const Bytes& value) override;
  Bytes compareSet(const std::string& key, const Bytes& expected, const Bytes& wanted) override;
  Bytes get(const std::string& key) override;
  std::int64_t add(const std::string& key, std::int64_t value) override;
  bool deleteKey(const std::string& key) override;
  bool check(const std::vector<std::string>& keys) override;
  std::int64_t getNumKeys() override;
  void wait(const std::vector<std::string>& keys) override { wait(keys, getTimeout()); }
  void wait(const std::vector<std::string>& keys, const milliseconds& timeout) override;
  void append(const std::string& key, const Bytes& value) override;
  std::vector<Bytes> multiGet(const std::vector<std::string>& keys) override;
  void multiSet(const std::vector<std::string>& keys, const std::vector<Bytes>& values) override;
  bool hasExtendedApi() const override { return true; }

  MeetingServer* server() const { return server_.get(); }  // where this rank serves
  const std::string& host() const { return host_; }        // where the store is, as a number; empty: on this machine

 private:
  Packet ask(const Packet& request);

  std::shared_ptr<MeetingClient> client_;
  std::shared_ptr<MeetingServer> server_;
  std::string host_;
};

// Serves a store to whom `admit` lets in. Returns the connection of rank 0, whose process this is. Throws SystemError.
c10::intrusive_ptr<MeetingStore> serve_meeting(UniqueFd listener, MeetingServer::Admit admit, milliseconds timeout,
                                               std::string host = "");

// Returns none if there is no channel, or its other end is no store, or has not let this process in.
StorePtr join_meeting(std::unique_ptr<Channel> channel, const Deadline& deadline, milliseconds timeout,
                      std::string host = "");

}  // namespace lockstep
