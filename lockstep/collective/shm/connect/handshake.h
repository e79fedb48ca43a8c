// SPDX-License-Identifier: Apache-2.0
// collective/shm/connect/handshake.h: the conversation in which the processes of a machine exchange descriptors of their
// memory and of themselves: the server's side and a client's. rendezvous_server.h has it message by message.
//
// Flow:    a listening socket (local_socket.h) -> here -> MachineParts (machine.h)
// Owns:    the connections, until they go
// Threads: one at a time
// Ranks:   HandshakeServer on local rank 0, HandshakeClient on the others
#pragma once

#include <string>
#include <vector>

#include "lockstep/base/int_vector.h"
#include "lockstep/base/unique_fd.h"
#include "lockstep/collective/shm/connect/local_socket.h"
#include "lockstep/collective/shm/connect/machine.h"
#include "lockstep/deadline.h"

namespace lockstep::shm {

// What a rank hands to the others.
struct Handles {
  UniqueFd memory;
  UniqueFd pidfd;
};

Handles own_handles(int rank);  // throws SystemError

UniqueFd make_memory(int rank);  // an empty arena. Throws SystemError

struct Connection {
  UniqueFd socket;
  Handles handles;
};

// The server's side, from the first connection to "go". Throws RendezvousError: ranks missing or lost at the deadline.
class HandshakeServer {
 public:
  HandshakeServer(int listener, int size, Deadline deadline) : listener_(listener), size_(size), deadline_(deadline) {
    peers_.resize(size);
  }

  void wait_for_hellos();
  void welcome(int control, const Handles& own);
  void wait_until_ready();
  void go();
  MachineParts take_parts(UniqueFd control, UniqueFd own_memory);

 private:
  bool complete() const { return missing().empty(); }
  std::vector<std::string> missing() const;
  void wait_for_input();
  void accept_new();
  bool hear(UniqueFd& newcomer);
  void drop_lost_peers();
  void send_to(int rank, const Message& message, const std::vector<int>& descriptors);
  [[noreturn]] void lost(int rank) const;
  Message message(Message::Kind kind, int rank) const {
    return {.kind = kind, .rank = rank, .size = size_, .layout = control_bytes(size_)};
  }

  int listener_;
  int size_;
  Deadline deadline_;
  std::vector<UniqueFd> newcomers_;  // connected, did not say hello yet
  IntVector<Connection> peers_;      // by rank; entry 0 stays empty
};

// A client's side.
class HandshakeClient {
 public:
  HandshakeClient(const std::string& address, int rank, int size, Deadline deadline)
      : rank_(rank), size_(size), deadline_(deadline), socket_(connect(address)) {}

  MachineParts exchange();
  void finish();

 private:
  static UniqueFd connect(const std::string& address);
  Message message(Message::Kind kind) const {
    return {.kind = kind, .rank = rank_, .size = size_, .layout = control_bytes(size_)};
  }
  Message receive(Message::Kind kind, std::vector<UniqueFd>& descriptors, std::size_t expected) const;
  [[noreturn]] static void refused();

  int rank_;
  int size_;
  Deadline deadline_;
  UniqueFd socket_;
};

}  // namespace lockstep::shm
