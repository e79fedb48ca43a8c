// SPDX-License-Identifier: Apache-2.0
// agent/meet/store_server.h: serves a store to the ranks or launchers of a job, and to nobody else.
//
// Flow:    meeting_client.h -> here -> store_table.h
// Owns:    the listening socket, a thread, the connections and what is stored
// Threads: any; its own thread does the work
// Ranks:   in rank 0's process, or in that of the first machine's launcher
//
// `admit` decides who may come in, from the socket alone, and so does the channel that it makes. docs/security.md has the
// limits of those who have not said hello yet; the oldest of them makes room.
//
// Keys that a connection has set by kSetOwn go when it is closed, or silent for as long as its last kSetOwn says. Silence
// counts only while this process runs itself: one that was stopped reads what has come before it misses anybody.
#pragma once

#include <functional>
#include <list>
#include <memory>
#include <thread>

#include "agent/meet/packet_stream.h"
#include "agent/meet/store_table.h"
#include "lockstep/base/files/unique_fd.h"
#include "lockstep/deadline.h"

namespace lockstep {

class MeetingServer {
 public:
  static constexpr size_t kMostNewcomers = 64;
  static constexpr std::chrono::seconds kSaysHelloWithin{10};

  using Admit = std::function<std::unique_ptr<Channel>(UniqueFd)>;  // none: refused. Does not block, throws nothing

  MeetingServer(UniqueFd listener, Admit admit);  // throws SystemError
  ~MeetingServer();                               // ends all connections
  MeetingServer& operator=(MeetingServer&&) = delete;

  // A connection for the process that serves, which needs no hello. Once.
  UniqueFd own_connection() { return std::move(own_end_); }

  void stop_listening() const;  // whoever has said hello stays; others can listen there when it returns

 private:
  struct Connection {
    PacketStream stream;
    int number;  // of the connection, from 1
    bool known = false;
    milliseconds silence{};  // 0: it has no keys of its own
    milliseconds silent{};   // for how long it has been
    Deadline says_hello_by = Deadline::after(kSaysHelloWithin);
  };
  enum Wish : char { kEnd, kNoMoreRanks };

  void ask(Wish wish) const;
  void serve();
  bool hear_wish();  // false: to end
  void accept_one();
  void make_room();
  bool serve_one(Connection& connection);
  bool is_late(Connection& connection, milliseconds passed) const;
  milliseconds longest_wait() const;

  UniqueFd listener_;
  Admit admit_;
  UniqueFd own_end_;
  UniqueFd wishes_;   // read by the thread
  UniqueFd control_;  // written by the others
  std::list<Connection> connections_;
  int numbers_ = 0;
  StoreTable table_;
  Deadline accept_again_ = Deadline::after({});
  std::thread thread_;
};

}  // namespace lockstep
