// SPDX-License-Identifier: Apache-2.0
// collective/shm/connect/rendezvous_server.h: how the ranks of a machine come to share memory.
//
// Ranks as processes. Local rank 0 makes a RendezvousServer: a Unix socket with a random name. Its address reaches the
// others by whatever store the job has. Then:
//
//   peer -> server   kHello: its rank, the size it believes in; with it the descriptors of its memory and of its own process
//   server -> peer   when all have said kHello: kKeep, with the control segment; then for each rank, with its two descriptors
//   peer -> server   kMet: everything is mapped
//   server -> peer   kDone: everybody is ready. The server closes the socket
//
// Both sides ask the kernel for the other's user and go on only if it is their own. Whoever says anything but a valid
// hello is disconnected and learns nothing; the server goes on waiting for the others. Only open descriptors keep the
// memory alive.
//
// Ranks as threads: make_thread_group.
//
// Owns:    the socket, until connect() is done or the RendezvousServer goes
// Threads: one at a time
// Ranks:   all ranks of the machine, once
#pragma once

#include "lockstep/collective/shm/group.h"

namespace lockstep::shm {

struct Options {
  milliseconds timeout = kDefaultTimeout;  // of every wait in a collective; each rank's own
  size_t staging_bytes = 0;                // of a chunk; 0: thresholds.h. Rank 0's value counts for all ranks
  bool share_ordinary_memory = true;       // ranks as threads: they read each other's memory wherever it lies
  std::vector<int> job_ranks{};            // what the job calls ranks 0, 1, ..., for messages; empty: the same
};

class RendezvousServer {
 public:
  explicit RendezvousServer(int size, const Options& options = {});  // throws SystemError

  std::string address() const { return address_; }

  // Blocks until all peers are connected and ready. Throws RendezvousError naming the ranks that are missing at the
  // deadline, or the one that was lost; SystemError.
  GroupPtr connect(Deadline deadline);

 private:
  int size_;
  Options options_;
  std::string address_;
  UniqueFd listener_;
};

// The other ranks, 1 ... size-1. Blocks until the server says go. Throws RendezvousError: nobody there, refused, or the
// deadline; SystemError.
GroupPtr join_rendezvous(const std::string& address, int rank, int size, Deadline deadline,
                         const Options& options = {});

// All ranks of a group whose ranks are threads of this process, in rank order. Throws SystemError.
std::vector<GroupPtr> make_thread_group(int size, const Options& options = {});

}  // namespace lockstep::shm
