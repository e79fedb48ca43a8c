// SPDX-License-Identifier: Apache-2.0
// collective/shm/connect/peers.h: the ranks of one machine, as one process sees them: their control segment, an arena of
// each, and whether they live. Ranks that are threads of one process share one Peers.
//
// Flow:    rendezvous_server.h -> here -> groups
// Owns:    the mappings and the descriptors of the peers' segments and processes
// Threads: any
// Ranks:   poisoning reaches every group of the machine: a rank that failed in one can't take part in the others
#pragma once

#include "lockstep/base/int_vector.h"
#include "lockstep/collective/shm/memory/arena.h"
#include "lockstep/collective/shm/memory/control_block.h"

namespace lockstep::shm {

struct PeerHandles {
  UniqueFd control;
  IntVector<UniqueFd> memories;        // the segment of each rank's arena
  IntVector<UniqueFd> pidfds;          // of each rank's process; none for the own rank, none at all for threads
  bool share_ordinary_memory = false;  // ranks are threads: their pointers mean the same to all
};

// A control segment for `size` ranks, ready to be handed out.
UniqueFd make_control_segment(int size, size_t staging_bytes);
size_t control_bytes(int size);

class Peers {
 public:
  explicit Peers(PeerHandles parts);  // throws SystemError

  int size() const { return arenas_.size(); }
  bool shares_ordinary_memory() const { return share_ordinary_memory_; }
  size_t staging_bytes() const { return block().staging_bytes; }
  bool more_ranks_than_cores() const;

  Seat& seat(int rank) const;
  void take_seat(int rank, int job_rank);  // once, before the first collective
  GroupArea group_area() const;            // of the group of all ranks
  const std::shared_ptr<Arena>& arena(int rank) const { return arenas_[rank]; }

  // The location, for the peers, of `bytes` bytes at `address`: private unless in an arena, or ranks are threads.
  Location locate(const void* address, size_t bytes) const;
  // The other way round, for a place that a peer announced. Maps it if it is new. Throws SystemError.
  std::byte* pointer(Location place, size_t bytes) const;

  bool poisoned() const { return block().poison.state.load() != Poison::kClean; }
  void poison(Cause cause, const std::string& what, const std::string& peer) const;
  void throw_if_poisoned(const std::string& here) const;  // throws PeerLost

  bool left(int rank) const { return seat(rank).left.load(std::memory_order_acquire); }
  void poison_if_any_died() const;

  // The job's number of a rank, as in messages. Known once all ranks took their seats.
  int job_rank(int rank) const;
  std::string name(int rank) const;      // "rank 2"
  std::string describe(int rank) const;  // "rank 2, pid 4711"

  // Notes that `rank` waits for `peer` (or for nobody in particular), and that it is alive.
  void note_wait(int rank, int peer) const;
  // The rank that holds up those that wait for `peer`: that one, unless it is alive and waits itself; then the one it
  // waits for, and so on.
  int holds_up(int peer) const;

  // Keeps memory with a SharedHeader until no rank uses it any more.
  void retire(Memory memory);

 private:
  MachineBlock& block() const { return *reinterpret_cast<MachineBlock*>(control_.at(0, sizeof(MachineBlock))); }

  mutable Window control_;
  IntVector<std::shared_ptr<Arena>> arenas_;
  IntVector<UniqueFd> pidfds_;
  std::mutex mutex_;
  std::vector<Memory> retired_;
  bool share_ordinary_memory_;
};

}  // namespace lockstep::shm
