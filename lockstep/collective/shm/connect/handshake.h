// collective/shm/connect/handshake.h: the conversation in which the processes of a machine hand each other their memory and
// themselves (rendezvous.h has it line by line): the host's side and a peer's.
//
// Flow:    a listening socket (local_socket.h) -> here -> MachineParts (machine.h)
// Owns:    the connections, until it goes
// Threads: one at a time
// Ranks:   Gathering on local rank 0, Joining on the others
#pragma once

#include <string>
#include <vector>

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

// The host's side, from the first connection to "go".
class Gathering {
 public:
  Gathering(int listener, int size) : listener_(listener), size_(size), peers_(static_cast<std::size_t>(size)) {}

  void wait_for_hellos(Deadline deadline);
  void welcome(int control, const Handles& own);
  void wait_until_ready(Deadline deadline);
  void go();
  MachineParts take_parts(UniqueFd control, UniqueFd own_memory);

 private:
  bool complete() const { return missing().empty(); }
  std::vector<std::string> missing() const;
  void wait_for_news(Deadline deadline);
  void accept_strangers();
  bool hear_stranger(UniqueFd& stranger);
  void drop_lost_peers();
  void send_to(int rank, const Message& message, const std::vector<int>& descriptors);
  [[noreturn]] void lost(int rank) const;
  Message message(Message::Kind kind, int rank) const {
    return {.kind = kind, .rank = rank, .size = size_, .layout = control_bytes(size_)};
  }

  int listener_;
  int size_;
  std::vector<UniqueFd> strangers_;  // connected, did not say hello yet
  std::vector<Connection> peers_;    // by rank; entry 0 stays empty
};

// A peer's side.
class Joining {
 public:
  Joining(const std::string& address, int rank, int size, Deadline deadline)
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
