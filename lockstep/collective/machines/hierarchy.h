// SPDX-License-Identifier: Apache-2.0
// collective/machines/hierarchy.h: this rank's connections on the two levels of a job on several machines, and what
// happens when a rank is lost.
//
//   inside    the ranks of this machine, in shared memory
//   between   a link to the ranks of the same local number on the other machines, one each
//   all       a link to all ranks
//
// Losses: when a rank is lost its machine's shared memory is poisoned, and every rank that finds out closes its links,
// so that the same happens on the other machines: all ranks of all machines get PeerLost. So they do when ranks make
// different calls (those that see it get MismatchError). What notices a loss: waits in shared memory, transfers, the
// watchdog of `between` (link.h) and, where a machine has several ranks, the Watchdog below.
//
// Owns:    the connections; memory and transfers of the collective under way
// Threads: one at a time; fail(), give_up() from any
// Ranks:   all of all machines make theirs at the same time
#pragma once

#include <array>

#include "lockstep/collective/machines/gloo_messages.h"
#include "lockstep/collective/machines/topology.h"

namespace lockstep {

// Memory and transfers of one chunk. The memory grows to the largest chunk and is used again by later calls.
struct ChunkBuffers {
  shm::Memory packed_memory;
  shm::Memory slice_memory;
  shm::Memory received_memory;
  std::byte* slice = nullptr;           // all_reduce: this owner's slice of the chunk
  IntVector<std::byte*> slices;         // of the piece of each machine
  IntVector<const std::byte*> sources;  // what is reduced here, by machine
  MachineLink::Transfers receives;
  MachineLink::Transfers sends;
};

// Calls `on_loss` when a rank of this machine is lost, also while nobody waits in shared memory: a thread waits for a
// message that only this rank itself sends, in the destructor.
class Watchdog {
 public:
  Watchdog(shm::Group& inside, MachineLink::OnLoss on_loss);
  ~Watchdog();

 private:
  std::uint8_t goodbye_ = 0;
  shm::Group group_;
  FuturePtr heard_;
  std::thread thread_;
};

class Hierarchy {
 public:
  // `group`: the ranks of this machine, in the order of their ranks. Blocks until this rank is connected to all others.
  // Throws RendezvousError.
  Hierarchy(shm::Group group, const Topology& topology_of_ranks, const c10::intrusive_ptr<c10d::Store>& store,
            const TransportOptions& options);

  // This rank is done, in good order.
  void leave();

  // Ends all waits of this rank and tells the others: this rank has failed; a call ended with `error`. The hierarchy is
  // of no more use then.
  void fail(const std::string& reason);
  void give_up(const std::exception_ptr& error);

  // After give_up(): Gloo no longer touches the memory of any transfer. Until then it may, and write where the
  // caller's arrays were.
  void forget_transfers();

  const Topology topology;
  const int rank;
  const int machine;           // this rank's
  const int machines;          // their number
  const int smallest_machine;  // topology.smallest_machine()
  const std::vector<int> ranks_here;

  std::array<ChunkBuffers, 3> buffers;   // of three chunks in turn
  std::unique_ptr<std::byte[]> scratch;  // of the call under way

  shm::Group inside;
  MachineLink all;
  GlooMessages messages;                 // over `all`
  std::unique_ptr<MachineLink> between;  // null where this rank never owns a slice

 private:
  void close(const std::exception_ptr& reason);

  std::string describe_;
  std::optional<Watchdog> watchdog_;
};

}  // namespace lockstep
