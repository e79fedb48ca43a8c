// SPDX-License-Identifier: Apache-2.0
// collective/meet/store_client.h: the c10d::Store that a job's ranks meet at.
//
// Flow:    rendezvous.h, machine_meeting.h -> here -> agent/meet/meeting_client.h
// Owns:    the connection, and with it in rank 0 the server
// Threads: any; one request at a time
// Ranks:   each has one
#pragma once

#include <string>
#include <vector>

#include "agent/meet/meeting_client.h"
#include "lockstep/collective/meet/store_ptr.h"
#include "lockstep/deadline.h"

namespace lockstep {

// Its waits look every few milliseconds. Keys are never removed unless a rank asks for it.
class MeetingStore final : public c10d::Store {
 public:
  using Bytes = std::vector<uint8_t>;

  MeetingStore(MeetingClientPtr client, milliseconds timeout) : Store(timeout), client_(std::move(client)) {}

  using Store::compareSet;
  using Store::set;
  c10::intrusive_ptr<Store> clone() override;  // over the same connection
  void set(const std::string& key, const Bytes& value) override;
  Bytes compareSet(const std::string& key, const Bytes& expected, const Bytes& wanted) override;
  Bytes get(const std::string& key) override;
  int64_t add(const std::string& key, int64_t value) override;
  bool deleteKey(const std::string& key) override;
  bool check(const std::vector<std::string>& keys) override;
  int64_t getNumKeys() override;
  void wait(const std::vector<std::string>& keys) override { wait(keys, getTimeout()); }
  void wait(const std::vector<std::string>& keys, const milliseconds& timeout) override;
  void append(const std::string& key, const Bytes& value) override;
  std::vector<Bytes> multiGet(const std::vector<std::string>& keys) override;
  void multiSet(const std::vector<std::string>& keys, const std::vector<Bytes>& values) override;
  bool hasExtendedApi() const override { return true; }

  const MeetingClient& client() const { return *client_; }

 private:
  Packet ask(const Packet& request);

  MeetingClientPtr client_;
};

}  // namespace lockstep
