// SPDX-License-Identifier: Apache-2.0
// agent/recover/job_memory.h: a rank's side of the launcher's keeper (agent/recover/keeper.h): memory that outlives the rank, and the
// generation of the job that comes after a loss.
//
// Flow:    collective/shm/ and train/ -> keep(); after PeerLost next_generation(); then previous()
// Owns:    one connection to the launcher, made when it is first needed
// Threads: any; one call at a time is served
// Ranks:   each by itself
#pragma once

#include <mutex>
#include <string>
#include <vector>

#include "agent/meet/packet_stream.h"
#include "lockstep/base/files/unique_fd.h"
#include "lockstep/base/process/own_process.h"

namespace lockstep {

class JobMemory {
 public:
  // Returns that of this process; null where no launcher of ours replaces ranks (LOCKSTEP_KEEPER is not set), and in a
  // forked child of a rank. Throws SystemError: the launcher is gone.
  static JobMemory* get();

  // The number of this process's present World, or of the one that comes next; 0 at first.
  int generation() const { return generation_; }

  // The launcher holds a copy of the descriptor from now on, under this generation, this rank and the name.
  void keep(const std::string& name, int fd);

  struct Kept {
    std::string name;
    int local_rank;  // of the generation that kept it
    UniqueFd fd;
  };
  // The memory of the newest complete generation before this one, of all ranks of this machine; empty: there is none.
  // Blocks for the launcher's answer.
  std::vector<Kept> previous();

  // This generation's memory holds all state: the launcher lets go of what is older. By one rank of a machine, once all of
  // its ranks have kept theirs.
  void complete() { tell(Packet::Kind::kComplete); }

  // This rank has met the others of its generation.
  void met() { tell(Packet::Kind::kMet); }

  // After PeerLost: blocks until the launcher has decided what comes next, at most for the timeout. Sets the variables of
  // this rank in the environment. False: there is no next generation; the job ends.
  bool next_generation(milliseconds timeout);

 private:
  explicit JobMemory(const std::string& address);  // "@NAME SEAT"
  void send(Packet::Kind kind, std::vector<std::string> texts, const std::vector<int>& descriptors = {}) const;
  void tell(Packet::Kind kind);
  void set_place();

  OwnProcess process_;
  std::mutex mutex_;
  UniqueFd socket_;
  int seat_ = -1;
  int local_rank_ = 0;
  int generation_ = 0;
};

}  // namespace lockstep
