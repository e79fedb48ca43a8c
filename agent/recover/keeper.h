// SPDX-License-Identifier: Apache-2.0
// agent/recover/keeper.h: what a launcher holds for its ranks while it replaces lost ones: their memory, by descriptors, and the
// word which generation of the job comes next.
//
// Memory belongs to the generation (0, 1, 2 ...; HACKING.md has the word) that made it. It is kept until a later one says that it
// has all state (kComplete).
//
// Flow:    agent/recover/job_memory.h in each rank -> local socket -> here, in the launcher's poll loop
// Owns:    the socket, which nothing of is left in a file system, and copies of the ranks' descriptors
// Threads: one, the launcher's
// Ranks:   none; only processes of the same user are listened to
#pragma once

#include <functional>
#include <list>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "agent/meet/packet_stream.h"
#include "agent/start/events.h"
#include "lockstep/base/files/unique_fd.h"

namespace lockstep {

using Variables = std::vector<std::pair<std::string, std::string>>;  // of the environment

class Keeper {
 public:
  using Word = std::function<void(int seat, int generation)>;  // of a rank

  // on_met: it has met the others. on_next: it waits for a later generation: see tell(). Throws SystemError.
  Keeper(Word on_met, Word on_next);

  std::string address(int seat) const;          // LOCKSTEP_KEEPER of the process at that seat
  void add_events(std::vector<Event>& events);  // for the next poll_events()
  void read_all();                              // what has been sent until now, also by ranks that have ended

  // Answers the rank that waits for a generation, with its variables. No effect if none waits.
  void tell(int seat, int generation, const Variables& variables);

  void forget(int seat);  // its process has ended: it waits for nothing

 private:
  struct Client {
    UniqueFd socket;
    int waits_at = -1;  // the seat that waits for a generation
  };
  struct Kept {
    std::vector<std::string> texts;  // of its kKeep
    UniqueFd fd;
  };

  void accept_new();
  bool serve(Client& client);  // false: it has sent nothing
  void handle(Client& client, const Packet& packet, std::vector<UniqueFd>& descriptors);
  void send_kept(Client& client, int generation);
  static bool send(Client& client, const Packet& packet, const std::vector<int>& descriptors = {});

  Word on_met_;
  Word on_next_;
  std::string address_;
  UniqueFd listener_;
  std::list<Client> clients_;
  std::map<int, std::vector<Kept>> kept_;  // by generation
  int complete_ = -1;                      // the newest generation whose memory holds all state
};

}  // namespace lockstep
